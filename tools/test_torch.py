#!/usr/bin/env python3
"""Test netfold with other versions of torch, each in an environment of its own: `make test-torch TORCH=2.15.0`.

    python tools/test_torch.py VERSION [VERSION ...] [--parts tests,products,conformance,probe] [--torch-tests FOLDER]
        [--keep]

One wheel, built once by the Python of .venv, serves every version. For each version: make .venv-torch-VERSION, install
torch and the wheel, run the parts, write the version's row to lab/bench/results/torch_versions.md, remove the
environment. Logs of the parts stay in .torch-logs/VERSION/.

Parts:
- tests        pytest over core/tests/torch;
- products     the demo, a benchmark, a profiled run, a recipe, an explanation: each ends with status 0;
- conformance  PyTorch's own suite on 2 and 3 ranks over gloo and netfold: everything that gloo passes must pass;
               with --torch-tests (test/distributed of PyTorch's repository at that version, which the wheel lacks) also
               the tests of reconfigure (core/tests/conformance/fault_tolerance.py);
- probe        core/tests/torch/probe.py over both: the same, but for what core/tests/torch/probe_explained.py explains.

Exit code: 0 where every part of every version is good; 1 where not; 3 where the disk lacks room or pip finds no such
version, so that nothing ran.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BUILDER = ROOT / ".venv" / "bin" / "python"
RESULTS = ROOT / "lab" / "bench" / "results" / "torch_versions.md"
PARTS = ("tests", "products", "conformance", "probe")
# A torch with CUDA takes 6 GB, its download cache as much again, and the tests need some.
NEEDED_GB = 25
# The version that the index serves without CUDA.
SMALL = "2.13.0"
SMALL_NEEDED_GB = 4
WORLD_SIZES = (2, 3)
INSTALL_TIMEOUT_S = 3600.0
PART_TIMEOUT_S = 5400.0
PRODUCT_TIMEOUT_S = 900.0

HEAD = """\
# Versions of torch

`make test-torch TORCH=VERSION` makes an environment with that torch and netfold's wheel, the same wheel for all, and
runs in it: `core/tests/torch`; the products (demo, benchmark, profiled run, recipe, explanation); PyTorch's own suite
on 2 and 3 ranks, over gloo and over netfold; and `core/tests/torch/probe.py`, which tries what torch.distributed
offers. Lost: what gloo passes and netfold does not, without an explanation (`EXPLAINED` in
`core/tests/conformance/__main__.py`, `core/tests/torch/probe_explained.py`). Reconfigure: passed, failed and skipped of
PyTorch's own tests of it, which the wheel lacks (`TORCH_TESTS=FOLDER`). A part that was not run is "-".

| torch | core/tests/torch: passed, failed, skipped | products | suite: gloo, netfold, lost \
| probe: gloo, netfold, lost, absent | minutes | machine | commit |
|---|---|---|---|---|---:|---|---|
"""


@dataclass
class Row:
    """The findings for one version; a cell a part."""

    version: str
    commit: str  # what the wheel was built of
    cells: dict[str, str] = field(default_factory=dict)
    good: bool = True

    def line(self, minutes: float) -> str:
        cells = [self.cells.get(part, "-") for part in PARTS]
        return f"| {self.version} | {' | '.join(cells)} | {minutes:.0f} | {machine()} | {self.commit} |"


def machine() -> str:
    return f"{os.cpu_count()} cores {platform.machine()}, Python {platform.python_version()}"


def commit() -> str:
    ended = subprocess.run(["git", "-C", str(ROOT), "describe", "--always", "--dirty"], capture_output=True, text=True)
    return ended.stdout.strip() or "unknown"


def say(text: str) -> None:
    print(f"test-torch: {text}", flush=True)


def run(command: list[str], log: Path, *, timeout_s: float, env: dict[str, str] | None = None, cwd: Path = ROOT) -> int:
    """The exit status; 124 where it ran past its time: all of its processes are ended then. Output goes to `log`."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("a") as file:
        file.write(f"$ {' '.join(command)}\n")
        file.flush()
        process = subprocess.Popen(
            command, stdout=file, stderr=subprocess.STDOUT, env=env, cwd=cwd, start_new_session=True
        )
        try:
            return process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            file.write(f"ended after {timeout_s:g} s\n")
            return 124
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def build_wheel(log: Path) -> Path:
    """netfold's wheel, for every torch; those of the other packages lie beside it."""
    folder = ROOT / "build" / "test-torch"
    shutil.rmtree(folder, ignore_errors=True)
    # The builder's own cmake and ninja, as in `make build`.
    env = {**os.environ, "PATH": f"{BUILDER.parent}{os.pathsep}{os.environ['PATH']}"}
    command = [
        str(BUILDER),
        "-m",
        "pip",
        "wheel",
        "--no-build-isolation",
        "--no-deps",
        "-w",
        str(folder),
        *(str(ROOT / package) for package in ("core", "plan", "train", "lab")),
    ]
    status = run(command, log, timeout_s=INSTALL_TIMEOUT_S, env=env)
    wheels = list(folder.glob("netfold-*.whl"))
    if status or not wheels:
        sys.exit(f"test-torch: the wheel did not build, see {log}")
    return wheels[0]


class Environment:
    """A virtual environment with one torch and the wheel."""

    def __init__(self, version: str) -> None:
        self.version = version
        self.folder = ROOT / f".venv-torch-{version}"
        self.logs = ROOT / ".torch-logs" / version
        self.python = self.folder / "bin" / "python"
        shutil.rmtree(self.logs, ignore_errors=True)

    def install(self, wheel: Path) -> bool:
        log = self.logs / "install.log"
        # What development pins, but for torch.
        pins = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("torch==")]
        constraints = self.logs / "constraints.txt"
        self.logs.mkdir(parents=True)
        constraints.write_text("\n".join([*pins, f"torch=={self.version}", ""]))
        pip = [
            str(self.python),
            "-m",
            "pip",
            "--disable-pip-version-check",
            "--quiet",
            "install",
            "-c",
            str(constraints),
        ]
        extras = [f"{wheel}[torch,train,lab]", "--find-links", str(wheel.parent), "--group", "dev"]
        commands = (
            [str(BUILDER), "-m", "venv", str(self.folder)],
            [*pip, f"torch=={self.version}", "numpy"],
            [*pip, *extras],
        )
        return all(run(command, log, timeout_s=INSTALL_TIMEOUT_S) == 0 for command in commands)

    def env(self) -> dict[str, str]:
        kept = {name: text for name, text in os.environ.items() if not name.startswith(("NETFOLD_", "PYTHON"))}
        return {
            **kept,
            "PATH": f"{self.python.parent}{os.pathsep}{os.environ['PATH']}",
            "VIRTUAL_ENV": str(self.folder),
            "CUDA_VISIBLE_DEVICES": "",
            "PYTHONDONTWRITEBYTECODE": "1",
        }

    def run(self, name: str, command: list[str], *, timeout_s: float = PART_TIMEOUT_S, cwd: Path = ROOT) -> int:
        return run(
            [str(self.python), *command], self.logs / f"{name}.log", timeout_s=timeout_s, env=self.env(), cwd=cwd
        )


def tests(environment: Environment, row: Row) -> None:
    report = environment.logs / "tests.xml"
    command = ["-m", "pytest", "-p", "no:cacheprovider", "-m", "not rack and not soak and not ecosystem", "-q"]
    command += ["--timeout", "600", "-n", "2", "--dist", "loadfile", f"--junitxml={report}", "core/tests/torch"]
    status = environment.run("tests", command)
    if not report.exists():
        row.cells["tests"], row.good = f"ended with status {status}", False
        return
    suite = next(xml.etree.ElementTree.parse(report).iter("testsuite"))
    count = {name: int(suite.get(name) or 0) for name in ("tests", "failures", "errors", "skipped")}
    failed = count["failures"] + count["errors"]
    row.cells["tests"] = f"{count['tests'] - failed - count['skipped']}, {failed}, {count['skipped']}"
    row.good &= status == 0


JOB = """\
import sys
import torch
import torch.distributed as dist
dist.init_process_group("netfold")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(100, 10))
for _ in range(4):
    model(torch.ones(4, 100)).sum().backward()
dist.destroy_process_group()
"""


def products(environment: Environment, row: Row) -> None:
    """Each as a user starts it, in an empty folder."""
    folder = environment.logs / "products"
    folder.mkdir()
    (folder / "job.py").write_text(JOB)
    netfold = ["-m", "netfold.cli"]
    torchrun = ["torchrun", "--standalone", "--nproc-per-node", "2", "job.py"]
    recipe = str(ROOT / "train/src/netfold_train/recipes" / "gpt.toml")
    sides = ["--backend", "netfold", "--backend", "gloo", "--ranks", "2"]
    short = ["--set", "training.steps=4", "--set", f"run.folder={folder}/runs"]
    commands = {
        "demo": [*netfold, "demo", "--quick"],
        "bench": [*netfold, "bench", "all-reduce", *sides, "-b", "4", "-e", "64K", "-n", "3", "-w", "1"],
        "profile": [*netfold, "profile", "run", "-o", "profiled", "--", *torchrun],
        "train": [*netfold, "train", "run", recipe, *short],
        "explain": [*netfold, "explain", "all-reduce", "--size", "4M"],
    }
    failed = [
        name
        for name, command in commands.items()
        if environment.run(f"product-{name}", command, timeout_s=PRODUCT_TIMEOUT_S, cwd=folder)
    ]
    row.cells["products"] = f"failed: {', '.join(failed)}" if failed else f"{len(commands)} good"
    row.good &= not failed


def conformance(environment: Environment, row: Row) -> None:
    report = environment.logs / "conformance.json"
    sizes = [text for size in WORLD_SIZES for text in ("--world-size", str(size))]
    status = environment.run("conformance", ["core/tests/conformance", *sizes, "--json", str(report)])
    if not report.exists():
        row.cells["conformance"], row.good = f"ended with status {status}", False
        return
    found = json.loads(report.read_text())
    gloo, netfold = (sum(each[backend] for each in found) for backend in ("gloo", "netfold"))
    lost = sorted({test for each in found for test in each["lost"]})
    row.cells["conformance"] = f"{gloo}, {netfold}, {len(lost)}" + (f" ({', '.join(lost)})" if lost else "")
    row.good &= status == 0


def fault_tolerance(environment: Environment, row: Row, torch_tests: Path) -> None:
    file = torch_tests / "test_c10d_fault_tolerance.py"
    status = environment.run("fault_tolerance", ["core/tests/conformance/fault_tolerance.py", str(file)])
    said = (environment.logs / "fault_tolerance.log").read_text()
    run = re.search(r"^Ran (\d+) tests", said, re.MULTILINE)
    count = {
        name: int(number)
        for name, number in re.findall(r"(failures|errors|skipped)=(\d+)", said.rstrip().splitlines()[-1])
    }
    failed, skipped = count.get("failures", 0) + count.get("errors", 0), count.get("skipped", 0)
    found = f"{int(run[1]) - failed - skipped}, {failed}, {skipped}" if run else f"ended with status {status}"
    row.cells["conformance"] = "; ".join(filter(None, (row.cells.get("conformance"), f"reconfigure: {found}")))
    row.good &= status == 0


def probe(environment: Environment, row: Row) -> None:
    report = environment.logs / "probe.json"
    command = [
        "core/tests/torch/probe.py",
        "netfold",
        "--against",
        "gloo",
        "--deadline-factor",
        "4",
        "--json",
        str(report),
    ]
    status = environment.run("probe", command)
    if not report.exists():
        row.cells["probe"], row.good = f"ended with status {status}", False
        return
    found = json.loads(report.read_text())
    gloo, netfold = (sum(text == "ok" for text in found[backend].values()) for backend in ("gloo", "netfold"))
    absent = sum(text.startswith("absent") for text in found["netfold"].values())
    lost = sorted(found["lost"])
    names = f" ({', '.join(lost)})" if lost else ""
    row.cells["probe"] = f"{gloo}, {netfold}, {len(lost)}{names}, {absent}"
    row.good &= status == 0


def write(row: Row, minutes: float) -> None:
    """Replace the version's row; those of other versions stay, and what somebody wrote below the table."""
    rows, notes = {}, ""
    if RESULTS.exists():
        text = RESULTS.read_text()
        for line in text.splitlines():
            if match := re.match(r"\| (\d+\.\d+\.\d+) \|", line):
                rows[match[1]] = line
        notes = text.rpartition("|\n")[2]
    rows[row.version] = row.line(minutes)
    ordered = sorted(rows, key=lambda version: [int(part) for part in version.split(".")])
    RESULTS.write_text(HEAD + "\n".join(rows[version] for version in ordered) + "\n" + notes)


def why_not(version: str) -> str | None:
    """Return why this version cannot be tested here, in a sentence; None where it can."""
    needed_gb = SMALL_NEEDED_GB if version == SMALL else NEEDED_GB
    free_gb = shutil.disk_usage(ROOT).free / 1e9
    if free_gb < needed_gb:
        return f"{free_gb:.0f} GB are free on the disk of {ROOT}, and {needed_gb} are needed"
    # A package index or a constraint of this machine may not have that release. Nothing is installed.
    asked = ["install", "--quiet", "--dry-run", "--no-deps", "--ignore-installed", f"torch=={version}"]
    found = subprocess.run([str(BUILDER), "-m", "pip", *asked], capture_output=True, text=True)
    if found.returncode:
        return f"pip does not find it here: {found.stderr.partition('ERROR: ')[2].partition(chr(10))[0]}"
    return None


def test_version(
    version: str, wheel: Path, built_of: str, parts: list[str], torch_tests: Path | None, keep: bool
) -> bool:
    began = time.monotonic()
    environment = Environment(version)
    row = Row(version, built_of)
    try:
        say(f"installing torch {version} into {environment.folder.name}")
        if not environment.install(wheel):
            say(f"torch {version} could not be installed, see {environment.logs}/install.log")
            return False
        for part in parts:
            since = time.monotonic()
            {"tests": tests, "products": products, "conformance": conformance, "probe": probe}[part](environment, row)
            if part == "conformance" and torch_tests is not None:
                fault_tolerance(environment, row, torch_tests)
            say(f"torch {version}, {part}: {row.cells[part]} ({(time.monotonic() - since) / 60:.1f} min)")
        write(row, (time.monotonic() - began) / 60)
    finally:
        if not keep:
            shutil.rmtree(environment.folder, ignore_errors=True)
    say(f"torch {version}: {'good' if row.good else 'NOT good'}; logs in {environment.logs}")
    return row.good


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("versions", nargs="+", metavar="VERSION", help="of torch, such as 2.15.0")
    parser.add_argument("--parts", default=",".join(PARTS), help="by commas")
    parser.add_argument("--torch-tests", type=Path, metavar="FOLDER", help="test/distributed of PyTorch's repository")
    parser.add_argument("--keep", action="store_true", help="leave the environments behind")
    parser.add_argument("--why-not", action="store_true", help="run nothing; say why a version cannot be tested here")
    asked = parser.parse_intermixed_args()
    parts = asked.parts.split(",")
    if unknown := set(parts) - set(PARTS):
        parser.error(f"no such part: {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    for version in asked.versions:
        if reason := why_not(version):
            if asked.why_not:
                print(reason)
                return 3
            said = f"test-torch: torch {version} was NOT tested: {reason}"
            print("=" * 79, said, "=" * 79, sep="\n", file=sys.stderr, flush=True)
            return 3
    if asked.why_not:
        return 0
    built_of = commit()
    wheel = build_wheel(ROOT / ".torch-logs" / "wheel.log")
    good = [test_version(version, wheel, built_of, parts, asked.torch_tests, asked.keep) for version in asked.versions]
    return 0 if all(good) else 1


if __name__ == "__main__":
    sys.exit(main())
