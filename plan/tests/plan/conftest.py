"""Tests of lab/bench/validation import it as `validation`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3] / "lab" / "bench"))
