"""A job's file: model, cluster, job, split, prices and training in one TOML."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from netfold.plan.request.key_lines import Key, key_lines

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


def read_job(path: Path) -> tuple[dict[str, Any], Mapping[Key, str]]:
    """What it says, and where each key stands: "job.toml:12". Raises ValueError where it cannot be read."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ValueError(f"{path}: is not text in UTF-8") from None
    try:
        tree = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{path}: is not TOML: {error}") from None
    return tree, {key: f"{path}:{line}" for key, line in key_lines(text).items()}
