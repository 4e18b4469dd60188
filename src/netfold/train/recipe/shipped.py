"""The recipes that come with netfold: `netfold train edsr` takes them by name."""

from __future__ import annotations

from pathlib import Path

_TRAIN = Path(__file__).resolve().parent.parent


def folder() -> Path:
    """Where the shipped recipes are: inside an installed package, or at the root of a checkout."""
    inside = _TRAIN / "recipes"
    return inside if inside.is_dir() else _TRAIN.parents[2] / "recipes"


def names() -> list[str]:
    """["bert", "dlrm", ...], sorted."""
    return sorted(path.stem for path in folder().glob("*.toml"))


def find(asked: Path) -> Path:
    """The shipped recipe of that name; `asked` itself where it exists, has a folder or an ending, or names none."""
    if asked.exists() or asked.name != str(asked) or asked.suffix:
        return asked
    shipped = folder() / f"{asked}.toml"
    return shipped if shipped.is_file() else asked
