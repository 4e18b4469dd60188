"""The P4 program in Tofino's chips, as p4c's open backend places it:

    .venv/bin/python lab/bench/tofino.py --compiler-commit 6a7e3844a9

The compiler, p4c-barefoot or bf-p4c of p4lang/p4c's backends/tofino, is found on the PATH. Its output is assembly and
the reports that the page is written from. Nothing runs the program: Tofino's model is not open.

A size takes minutes. `--folder` keeps the outputs; a size that is there, of the same program, is not compiled again.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import subprocess
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import driver

PROGRAM = Path(__file__).parents[2] / "core" / "native" / "p4" / "netfold_tna.p4"
# By target: its architecture, its name, and stateful ALUs of a stage.
TARGETS = {"tofino": ("tna", "Tofino 1", 4), "tofino2": ("t2na", "Tofino 2", 4)}
# For a job with the largest window.
JOB_SLOTS = 128
LIMIT_S = 3600


@dataclass(frozen=True)
class Size:
    """The target of a compilation. leaf: whether a job may have a parent."""

    target: str
    values: int
    leaf: bool
    slots: int = 4096
    jobs: int = 16

    def __str__(self) -> str:
        return f"{self.target}-{self.values}-{'leaf' if self.leaf else 'root'}-{self.slots}-{self.jobs}"


SIZES = (Size("tofino2", 32, leaf=True), Size("tofino", 16, leaf=False), Size("tofino", 8, leaf=True))


def find_compiler() -> str | None:
    return shutil.which("p4c-barefoot") or shutil.which("bf-p4c")


def compile_size(compiler: str, size: Size, out: Path) -> str:
    """Compile the program into the folder `out`; return the compiler's first error, or ""."""
    arch = TARGETS[size.target][0]
    argv = [compiler, "--target", size.target, "--arch", arch]
    argv += ["-D", f"NETFOLD_VALUES={size.values}", "-D", f"NETFOLD_LEAF={int(size.leaf)}"]
    argv += ["-D", f"NETFOLD_SLOTS={size.slots}", "-D", f"NETFOLD_JOBS={size.jobs}"]
    expanded = subprocess.run([*argv, "-E", str(PROGRAM)], capture_output=True, text=True, timeout=LIMIT_S).stdout
    code = re.sub(r"^#.*|//.*|\s", "", expanded, flags=re.MULTILINE)
    digest = hashlib.sha256(code.encode()).hexdigest()
    kept = out / "program.json"
    if kept.exists() and (found := json.loads(kept.read_text()))["digest"] == digest:
        return str(found["error"])
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    made = subprocess.run([*argv, "-g", "-o", str(out), str(PROGRAM)], capture_output=True, text=True, timeout=LIMIT_S)
    error = ""
    if made.returncode != 0:
        errors = [line for line in (made.stdout + made.stderr).splitlines() if "error:" in line]
        error = errors[0] if errors else f"exit status {made.returncode}"
    kept.write_text(json.dumps({"digest": digest, "error": error}))
    return error


@dataclass(frozen=True)
class Report:
    """The part of a chip that a compiled program takes, from the compiler's reports. Pairs are (used, all)."""

    stages: tuple[int, int]
    sram: tuple[int, int]  # blocks of 16 KiB
    tcam: tuple[int, int]
    stateful: tuple[int, int]
    phv_bits: tuple[int, int]
    by_stage: list[tuple[int, int, int, int, list[str]]]  # stage, SRAM, TCAM, logical tables, registers
    most_slots: int  # by arithmetic, from the blocks that registers have


def read_report(out: Path, target: str) -> Report:
    logs = out / "pipe" / "logs"
    resources = json.loads((logs / "resources.json").read_text())["resources"]
    mau = resources["mau"]
    all_stages, stages = mau["nStages"], mau["mau_stages"]
    by_stage = []
    for stage in stages:
        registers = [_register(each) for each in stage["meter_alus"]["meters"]]
        tables = len(stage["logical_tables"]["ids"])
        row = (stage["stage_number"], len(stage["rams"]["srams"]), len(stage["tcams"]["tcams"]), tables, registers)
        by_stage.append(row)
    first = stages[0]
    containers = json.loads((logs / "phv.json").read_text())["containers"]
    used_bits = sum(each["bit_width"] for each in containers if each["slices"])
    all_bits = sum(kind["units"] * kind["width"] for kinds in resources["phv_containers"].values() for kind in kinds)
    return Report(
        (len(stages), all_stages),
        (sum(row[1] for row in by_stage), all_stages * first["rams"]["nRows"] * first["rams"]["nColumns"]),
        (sum(row[2] for row in by_stage), all_stages * first["tcams"]["nRows"] * first["tcams"]["nColumns"]),
        (sum(len(row[4]) for row in by_stage), all_stages * TARGETS[target][2]),
        (used_bits, all_bits),
        by_stage,
        max(slots for slots in (1 << bits for bits in range(12, 17)) if all(_holds(each, slots) for each in stages)),
    )


def _holds(stage: dict[str, Any], slots: int) -> bool:
    """Whether a stage has the memory for registers of so many slots.

    A register has a block of SRAM, each with a map RAM, for every 16 KiB, and one block more.
    """
    rams, maps = stage["rams"], stage["map_rams"]
    blocks = Counter(use["used_by"] for each in maps["maprams"] for use in each["usages"])
    grown = sum(
        (count - 1) * slots // Size.slots + 1 if ".slot_" in name or ".sum_" in name else count
        for name, count in blocks.items()
    )
    others = len(rams["srams"]) - sum(blocks.values())
    return bool(grown <= maps["nRows"] * maps["nUnits"] and others + grown <= rams["nRows"] * rams["nColumns"])


def _register(meter: dict[str, Any]) -> str:
    return str(meter["usages"][0]["used_by"]).rsplit(".", 1)[-1]


def tofino(compiler_commit: str = "", folder: str = "") -> str:
    """The P4 program in Tofino"""
    compiler = find_compiler()
    if compiler is None:
        raise SystemExit("neither p4c-barefoot nor bf-p4c, of p4lang/p4c's backends/tofino, is on the PATH")
    shown = subprocess.run([compiler, "--version"], capture_output=True, text=True)
    found = re.search(r"Version (\S+)", shown.stdout + shown.stderr)
    version = found[1] if found else "of unknown version"
    rows, details = [], []
    with tempfile.TemporaryDirectory() as scratch:
        for size in SIZES:
            out = Path(folder or scratch) / str(size)
            error = compile_size(compiler, size, out)
            name, parents = TARGETS[size.target][1], "yes" if size.leaf else "no"
            row = [name, size.values, parents, f"{size.slots:,}", min(size.jobs, size.slots // JOB_SLOTS)]
            if error:
                rows.append([*row, "no: " + _without_paths(error), *[""] * 5])
                continue
            report = read_report(out, size.target)
            pairs = (report.stages, report.sram, report.tcam, report.stateful, report.phv_bits)
            fits = "yes" if report.stages[0] <= report.stages[1] else "no"
            rows.append([*row, fits, *(_pair(pair) for pair in pairs)])
            if size.slots == Size.slots:
                most = report.most_slots
                details.append(
                    f"{name}, {size.values} values, parents: {parents}. By the memory of each stage, the largest\n"
                    f"power of two of slots is {most:,}, for {most // JOB_SLOTS} jobs (arithmetic: not compiled).\n\n"
                    f"{_stages(report)}"
                )
    head = "chip | values | parents | slots | jobs | fits | stages | SRAM | TCAM | stateful ALUs | PHV bits"
    commit = f", commit {compiler_commit}" if compiler_commit else ""
    by_stage = "\n\n".join(details)
    return f"""Compiler: {Path(compiler).name} {version} of p4lang/p4c{commit}. Its output is assembly and
reports, of which the tables are (`resources.json`, `phv.json`). That tree has no assembler and no model of the chip, so
**nothing has run the program**.

{driver.table(head, rows)}

values: of 32 bits, in a packet. parents: whether a job may have a parent, in a tree of switches (`NETFOLD_LEAF`). jobs:
at once, each with the largest window, of 64 chunks, and so {JOB_SLOTS} slots. The last five columns are what one pipe
has, and what of it is used: stages; blocks of SRAM (16 KiB) and of TCAM; stateful ALUs; PHV in whole containers.

## By stage

{by_stage}"""


def _pair(pair: tuple[int, int]) -> str:
    return f"{pair[0]} of {pair[1]}"


def _stages(report: Report) -> str:
    rows = []
    for stage, sram, tcam, tables, registers in report.by_stage:
        sums = sum(each.startswith("sum_") for each in registers)
        held = [f"`{each}`" for each in registers if not each.startswith("sum_")] + ([f"{sums} values"] if sums else [])
        rows.append([stage, tables, sram, tcam, ", ".join(held)])
    return driver.table("stage | tables | SRAM | TCAM | registers", rows)


def _without_paths(error: str) -> str:
    return re.sub(r"\S*/", "", error)


if __name__ == "__main__":
    driver.run(tofino)
