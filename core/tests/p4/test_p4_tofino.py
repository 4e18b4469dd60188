"""Tofino's program, as p4c's open backend for it compiles it. Nothing here runs it: Tofino's model is not open."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from p4_rig import ROOT

sys.path.insert(0, str(ROOT / "lab" / "bench"))
import tofino

pytestmark = [
    pytest.mark.soak,
    pytest.mark.timeout(tofino.LIMIT_S),
    pytest.mark.skipif(
        tofino.find_compiler() is None, reason="neither p4c-barefoot nor bf-p4c, of p4lang/p4c, is on the PATH"
    ),
]


def test_tofino_2_holds_the_documented_size(tmp_path: Path) -> None:
    profile = (ROOT / "docs" / "reference" / "hardware-profile.md").read_text()
    claim = re.search(r"\| Tofino 2 \| (\d+) \| yes \| ([\d,]+) \| (\d+) \| 20 of 20 \|", profile)
    assert claim is not None
    values, slots, jobs = (int(each.replace(",", "")) for each in claim.groups())
    compiler = tofino.find_compiler()
    assert compiler is not None
    size = tofino.Size("tofino2", values, leaf=True, slots=slots, jobs=jobs)
    assert tofino.compile_size(compiler, size, tmp_path / "out") == ""
    report = tofino.read_report(tmp_path / "out", "tofino2")
    used, there = report.stages
    assert used <= there == 20
    registers = [register for *_, names in report.by_stage for register in names]
    assert sorted(each for each in registers if each.startswith("sum_")) == sorted(f"sum_{i}" for i in range(values))
