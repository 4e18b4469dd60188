"""lab/bench/gpus.py goes on when a part fails, is late, or cannot run, and its page names the part."""

from __future__ import annotations

import importlib.util
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from load import seconds

SCRIPT = Path(__file__).parents[3] / "lab" / "bench" / "gpus.py"


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Any:
    spec = importlib.util.spec_from_file_location("bench_gpus", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "bench_gpus", module)
    spec.loader.exec_module(module)
    return module


def test_every_part_is_on_the_page_whatever_becomes_of_the_others(
    gpus: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(logs: Path, limit_s: float) -> Any:
        raise FileNotFoundError("no such data set")

    outcomes = {"second": gpus.Outcome("not run", "No card."), "third": gpus.Outcome("done", "| a |\n|---|\n| 1 |")}
    parts = [gpus.Part("first", 5.0, fails)]
    parts += [gpus.Part(name, 5.0, lambda logs, limit_s, of=of: of) for name, of in outcomes.items()]
    monkeypatch.setattr(gpus, "_parts", lambda device, recipe_s: parts)
    with pytest.raises(SystemExit) as ended:
        gpus.main(tmp_path, "cpu", "", 1.0)
    page = (tmp_path / "gpus.md").read_text()
    assert ended.value.code == 1 and "3 of 3 parts" in page
    for text in ("## first: failed\n\nFileNotFoundError: no such data set", "## second: not run", "## third: done"):
        assert text in page
    monkeypatch.setattr(gpus, "TOTAL_S", 0.0)
    with pytest.raises(SystemExit) as ended:
        gpus.main(tmp_path, "cpu", "th", 1.0)
    page = (tmp_path / "gpus.md").read_text()
    assert ended.value.code == 2 and "1 of 1 parts" in page and "The 0 s of all parts were over." in page


def test_a_late_part_is_ended_with_what_it_started(gpus: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "_GRACE_S", 0.2)
    sleeps = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('began', flush=True); "
    began = time.monotonic()
    ended, log = gpus._bounded([sys.executable, "-c", sleeps + "time.sleep(60)"], tmp_path / "log", 1.0)
    assert ended < 0 and log == "began\n" and time.monotonic() - began < seconds(10)
    outcome = gpus._failed(ended, 1.0, log)
    assert (outcome.verdict, outcome.text) == (
        "failed",
        "It was not done after 1 s. The last lines:\n\n```\nbegan\n```",
    )


def test_a_run_is_asked_to_stop_and_gets_time_to_end(gpus: Any, tmp_path: Path) -> None:
    stops = "import signal, sys, time; signal.signal(signal.SIGTERM, lambda *_: sys.exit(75)); time.sleep(60)"
    ended, _ = gpus._bounded([sys.executable, "-c", stops], tmp_path / "log", seconds(20), stop_after_s=seconds(1))
    assert ended == 75
