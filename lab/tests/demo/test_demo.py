"""`netfold demo --quick` from end to end: a real switch, real workers, both backends."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from load import seconds

pytestmark = pytest.mark.torch

DEADLINE_S = 240


def _demo(folder: Path, *options: str, **environment: str) -> subprocess.CompletedProcess[str]:
    (folder / "tmp").mkdir()
    return subprocess.run(
        [sys.executable, "-m", "netfold.cli", "demo", *options],
        cwd=folder,
        env={**os.environ, "TMPDIR": str(folder / "tmp"), "COLUMNS": "100", **environment},
        capture_output=True,
        text=True,
        timeout=seconds(DEADLINE_S),
        check=False,
    )


@pytest.mark.jobs
def test_the_smallest_demo_beats_bicubic_agrees_with_gloo_and_leaves_nothing_but_its_page(tmp_path: Path) -> None:
    ended = _demo(tmp_path, "--quick", "--ranks", "2")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    for row in ("bicubic", "EDSR, netfold", "EDSR, gloo"):
        assert row in ended.stdout
    page = (tmp_path / "netfold-demo" / "report.html").read_text()
    assert page.rstrip().endswith("</html>")
    assert not re.search("http(?!-equiv)", page)
    # By name: torch itself keeps a cache (`torchinductor_<user>`) in the temporary folder, for the next process.
    assert list((tmp_path / "tmp").glob("netfold-*")) == []


@pytest.mark.jobs
def test_gradients_in_bfloat16_are_distinguished_from_rounding(tmp_path: Path) -> None:
    ended = _demo(tmp_path, "--quick", NETFOLD_WIRE_DTYPE="bf16")
    assert ended.returncode == 1, ended.stdout + ended.stderr
    assert "the losses over netfold differ from gloo's by more than rounding" in ended.stderr
    assert "EDSR trained" not in ended.stderr


def test_too_few_steps_are_refused_in_a_sentence(tmp_path: Path) -> None:
    ended = _demo(tmp_path, "--steps", "5")
    assert ended.returncode == 2
    assert ended.stderr.startswith("netfold demo: steps: 5, expected more than")
