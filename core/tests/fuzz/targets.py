"""The parsers under a fuzzer and sanitizers: how targets are compiled and run.

    .venv/bin/python core/tests/fuzz/targets.py SECONDS [NAME...]    fuzz each target, and keep new inputs in the corpus

libFuzzer comes with clang (Debian: clang and libclang-rt-dev). Without it the corpus still runs, compiled by c++ under
the same sanitizers, and no new inputs are searched.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
NATIVE = HERE.parents[1] / "native"
MEMORY_MB = 2048  # a target that uses more memory breaks an invariant
NAMES = ("packet", "switch_job", "leaf", "worker", "msgpack")
# The whole parser with its checks. Kernels have tests of their own, and are linked as they were built.
SOURCES = [*sorted((NATIVE / "protocol").glob("*.cpp")), NATIVE / "control" / "msgpack.cpp"]
FLAGS = ["-std=c++20", "-O1", "-g", "-fno-omit-frame-pointer", "-fno-sanitize-recover=all"]
FLAGS += [f"-I{NATIVE / folder / 'include'}" for folder in ("protocol", "kernels", "control")]


def corpus(name: str) -> Path:
    return HERE / "corpus" / name


def fuzzer_compiler() -> str | None:
    """A clang++ that has libFuzzer, or None."""
    names = ["clang++", *(f"clang++-{version}" for version in range(21, 13, -1))]
    for path in filter(None, map(shutil.which, names)):
        with tempfile.TemporaryDirectory() as folder:
            source = Path(folder) / "probe.cpp"
            source.write_text('extern "C" int LLVMFuzzerTestOneInput(const char*, unsigned long) { return 0; }\n')
            command = [path, "-fsanitize=fuzzer,address,undefined", str(source), "-o", str(source.with_suffix(""))]
            if subprocess.run(command, capture_output=True).returncode == 0:
                return path
    return None


def sanitizers(compiler: str | None) -> str:
    return "-fsanitize=address,undefined" if compiler is None else "-fsanitize=fuzzer-no-link,address,undefined"


def parsers(folder: Path, compiler: str | None) -> list[Path]:
    """Compile what all targets share, once: with a fuzzer's instrumentation by `compiler`, or without it by c++."""
    made = []
    for source in SOURCES:
        made.append(folder / f"{source.stem}.o")
        command = [compiler or "c++", *FLAGS, sanitizers(compiler), "-c", str(source), "-o", str(made[-1])]
        subprocess.run(command, check=True)
    return made


def make(name: str, folder: Path, compiler: str | None, parsers: list[Path]) -> Path:
    """Compile a target, and link it with `parsers`: with a fuzzer by `compiler`, or without one by c++."""
    kernels = sorted(NATIVE.parent.glob("build/*/native/libnetfold_kernels.a"), key=lambda path: path.stat().st_mtime)
    if not kernels:
        raise FileNotFoundError("core/build/*/native has no libnetfold_kernels.a; `make build` makes it")
    program = folder / name
    inputs = [HERE / f"{name}.cpp", *parsers, kernels[-1]]
    if compiler is None:
        command = ["c++", *FLAGS, sanitizers(compiler), str(HERE / "replay.cpp"), *map(str, inputs)]
    else:
        command = [compiler, *FLAGS, "-fsanitize=fuzzer,address,undefined", *map(str, inputs)]
    subprocess.run([*command, "-o", str(program)], check=True)
    return program


def fuzz(name: str, program: Path, seconds: int, found: Path) -> subprocess.CompletedProcess[str]:
    """Fuzz for that long from the corpus; new inputs, and one that breaks an invariant, go to `found`."""
    found.mkdir(parents=True, exist_ok=True)
    command = [str(program), f"-max_total_time={seconds}", "-seed=1", "-max_len=1024", "-use_value_profile=1"]
    command += [f"-artifact_prefix={found}/", str(found), str(corpus(name))]
    # libFuzzer's own limit reads ru_maxrss, which a process inherits from whoever started it: a test process that once
    # held 2 GB ended every run as out of memory. The sanitizer's limit reads the present RSS.
    command += ["-rss_limit_mb=0"]
    environment = os.environ | {"ASAN_OPTIONS": f"hard_rss_limit_mb={MEMORY_MB}"}
    return subprocess.run(command, capture_output=True, text=True, env=environment)


def main(seconds: str, *names: str) -> int:
    compiler = fuzzer_compiler()
    if compiler is None:
        print("there is no clang++ with libFuzzer (Debian: clang and libclang-rt-dev)", file=sys.stderr)
        return 2
    for name in names or NAMES:
        corpus(name).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory() as folder:
            program = make(name, Path(folder), compiler, parsers(Path(folder), compiler))
            found = Path(folder) / "found"
            run = fuzz(name, program, int(seconds), found)
            if run.returncode != 0:
                print(run.stderr, file=sys.stderr)
                return 1
            # Keep the fewest inputs that cover the same lines.
            kept = Path(folder) / "kept"
            kept.mkdir()
            merge = [str(program), "-merge=1", "-use_counters=0", str(kept), str(corpus(name)), str(found)]
            subprocess.run(merge, check=True, capture_output=True)
            shutil.rmtree(corpus(name))
            shutil.copytree(kept, corpus(name))
        print(f"{name}: {run.stderr.strip().splitlines()[-1]}; {len(list(corpus(name).iterdir()))} inputs kept")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
