"""The packet parsers under sanitizers: the kept inputs always, and a bounded hunt where there is a fuzzer."""

import subprocess

import pytest
from targets import NAMES, corpus, fuzz, fuzzer_compiler, make

SECONDS = 5


@pytest.mark.parametrize("name", NAMES)
def test_kept_inputs_break_no_promise(name, tmp_path):
    inputs = sorted(map(str, corpus(name).iterdir()))
    assert inputs
    run = subprocess.run([make(name, tmp_path, None), *inputs], capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stderr


@pytest.fixture(scope="module")
def compiler():
    found = fuzzer_compiler()
    if found is None:
        pytest.skip("no clang++ with libFuzzer here (Debian: clang and libclang-rt-dev): nothing new is looked for")
    return found


@pytest.mark.parametrize("name", NAMES)
def test_a_bounded_hunt_finds_no_broken_promise(name, compiler, tmp_path):
    run = fuzz(name, make(name, tmp_path, compiler), SECONDS, tmp_path / "found")
    assert run.returncode == 0, run.stderr[-4000:]
