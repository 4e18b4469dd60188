"""The packet parsers under sanitizers: the corpus always, and new inputs by `make test-fuzz`."""

import os
import sys

import load
import pytest
from targets import HERE, MEMORY_MB, NAMES, corpus, fuzz, fuzzer_compiler, make, parsers

SECONDS = int(os.environ.get("FUZZ_SECONDS", "5"))


@pytest.fixture(scope="module")
def checked_parsers(tmp_path_factory):
    return parsers(tmp_path_factory.mktemp("parsers"), None)


@pytest.mark.parametrize("name", NAMES)
def test_corpus_inputs_break_no_invariant(name, checked_parsers, tmp_path):
    inputs = sorted(map(str, corpus(name).iterdir()))
    assert inputs
    run = load.run([make(name, tmp_path, None, checked_parsers), *inputs], 60)
    assert run.returncode == 0, run.stderr


@pytest.fixture(scope="module")
def compiler():
    found = fuzzer_compiler()
    if found is None:
        pytest.skip("no clang++ with libFuzzer here (Debian: clang and libclang-rt-dev): nothing new is looked for")
    return found


@pytest.fixture(scope="module")
def fuzzed_parsers(compiler, tmp_path_factory):
    return parsers(tmp_path_factory.mktemp("parsers"), compiler)


@pytest.mark.fuzz
@pytest.mark.parametrize("name", NAMES)
def test_a_bounded_fuzz_run_finds_no_broken_invariant(name, compiler, fuzzed_parsers, tmp_path):
    run = fuzz(name, make(name, tmp_path, compiler, fuzzed_parsers), SECONDS, tmp_path / "found")
    assert run.returncode == 0, run.stderr[-4000:]


STARTED_BY_ONE_THAT_HELD_MUCH = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from targets import MEMORY_MB, fuzz
held = bytes(range(256)) * ((MEMORY_MB + 100) << 12)
del held
run = fuzz("packet", Path(sys.argv[2]), 1, Path(sys.argv[3]))
sys.exit(run.stderr[-2000:] if run.returncode else 0)
"""


@pytest.mark.fuzz
def test_a_fuzz_run_counts_only_its_own_memory(compiler, fuzzed_parsers, tmp_path):
    with open("/proc/meminfo") as meminfo:
        available_mb = next(int(line.split()[1]) // 1024 for line in meminfo if line.startswith("MemAvailable"))
    if available_mb < 2 * MEMORY_MB:
        pytest.skip(f"takes {MEMORY_MB + 100} MB for a moment, and {available_mb} MB are free")
    command = [sys.executable, "-c", STARTED_BY_ONE_THAT_HELD_MUCH, str(HERE)]
    command += [str(make("packet", tmp_path, compiler, fuzzed_parsers)), str(tmp_path / "found")]
    run = load.run(command, 120)
    assert run.returncode == 0, run.stderr
