"""The folder of a training run, read back: its metrics and its page. The ranks of `netfold_train` write it.

    RUN/recipe.json        the recipe with all defaults; it can be run again
    RUN/environment.json   versions, hosts, cores, settings: one entry for each start
    RUN/metrics.jsonl      steps, evaluations, notes (`metrics`)
    RUN/report.html        the page (`page`), and profile.html of RUN/profile
    RUN/pictures, RUN/tensorboard, RUN/checkpoints

A run is finished when the last line of metrics.jsonl is "ended" with "done". The next start of the same name continues
an unfinished run that no process is writing.
`machine` describes what a number was measured on, for benchmarks too.
May use: page, profile, plan. Needs no torch. Only train, bench, cli and the demo import it.
Invariant: it changes nothing but the page.
Tests: `pytest train/tests/train/test_report_page.py train/tests/train/test_metrics_file.py`.
"""

from __future__ import annotations

import os
from pathlib import Path

RECIPE = "recipe.json"
ENVIRONMENT = "environment.json"
METRICS = "metrics.jsonl"
PROFILE = "profile"
PICTURES = "pictures"
"""A folder of PNG files, and PICTURE_LIST, which has the step and each picture's title, text and file."""
PICTURE_LIST = "pictures.json"
PAGE = "report.html"


def write_whole(path: Path, text: str) -> None:
    """Write a file completely or not at all. Raises OSError."""
    new = path.with_name(path.name + ".new")
    new.write_text(text, encoding="utf-8")
    os.replace(new, path)
