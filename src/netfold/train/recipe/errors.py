"""What is wrong with a recipe: sentences, each about a key, and where that key was written."""

from __future__ import annotations

import difflib
import re
import traceback
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from netfold.plan.request.key_lines import Key, line_of
from netfold.train.recipe import Recipe

# Not a file's name: .../data.txt.
_KEY = re.compile(rf"(?<![\w/.-])(?:{'|'.join(Recipe.model_fields)})(?:\.[a-z_]+)+")
# torch's words round what a communication hook's future was given.
_CALLBACK = re.compile(r"^Got the following error when running the callback: (.*?)\s+At:\s.*$", re.DOTALL)
_NETFOLD = Path(__file__).parents[2]


@dataclass(frozen=True)
class Source:
    """What a recipe was read from."""

    file: Path | None = None
    """None: it was made in Python."""
    lines: Mapping[Key, int] = field(default_factory=dict)
    settings: Mapping[Key, str] = field(default_factory=dict)
    """Of --set: the key, and the whole of what was said. These came after the file."""

    def as_json(self) -> dict[str, Any]:
        """For `from_json`, in another process."""
        return {
            "file": None if self.file is None else str(self.file),
            "lines": [[*key, line] for key, line in self.lines.items()],
            "settings": [[*key, setting] for key, setting in self.settings.items()],
        }

    @classmethod
    def from_json(cls, said: Mapping[str, Any]) -> Source:
        lines, settings = ({tuple(key): last for *key, last in said[name]} for name in ("lines", "settings"))
        return cls(None if said["file"] is None else Path(said["file"]), lines, settings)

    def placed(self, error: ValueError) -> list[str]:
        """The sentences of an error, each with its place before it where it is about a recipe's key."""
        if isinstance(error, RecipeError):
            return [self.place(sentence) + sentence for sentence in error.problems]
        sentence = error_sentence(error)
        return [(self.place(sentence) if _KEY.search(sentence) else "") + sentence]

    def place(self, sentence: str, key: Key | None = None) -> str:
        """Where the key stands that the sentence is about: `key`, or else the first of those that the sentence names
        that was written anywhere. "recipe.toml:12: ", "--set training.batch=3: " or, of no line, "recipe.toml: "."""
        named = [key] if key is not None else [tuple(text.split(".")) for text in _KEY.findall(sentence)]
        for each in named:
            for key, setting in self.settings.items():
                if key[: len(each)] == each[: len(key)]:
                    return f"--set {setting}: "
            if each in self.lines:
                return f"{self.file}:{self.lines[each]}: "
        # A key that is missing, or has its default: the table that it belongs to.
        line = next((line for each in named if (line := line_of(each, self.lines)) is not None), None)
        return "" if self.file is None else f"{self.file}: " if line is None else f"{self.file}:{line}: "


class RecipeError(ValueError):
    """A recipe that cannot be trained: one line each of `problems`, which say where, which key, what and what to do."""

    def __init__(self, problems: Sequence[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = tuple(problems)


def suggest(word: str, known: Iterable[str]) -> str:
    """ "did you mean x?" where something is spelt alike, else what there is."""
    known = list(known)
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.6)
    return f"did you mean {close[0]}?" if close else f"there is {', '.join(known)}"


def error_text(error: BaseException) -> str:
    """What it says, without torch's words and stack round what a communication hook raised."""
    return _CALLBACK.sub(r"\1", str(error))


def error_kind(error: BaseException) -> str:
    """The name of its class; of what a communication hook raised, of which torch keeps words alone, the one in them."""
    told = _CALLBACK.match(str(error))
    first = told.group(1).partition(":")[0] if told else ""
    return first if first.isidentifier() else type(error).__name__


def error_sentence(error: BaseException) -> str:
    """What was raised: netfold's own ValueErrors as they are; others with their type, and the line that raised them."""
    text = " ".join(error_text(error).split())
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    last = next(iter(traceback.extract_tb(error.__traceback__)[-1:]), None)
    ours = last is None or Path(last.filename).is_relative_to(_NETFOLD)
    if text and (_CALLBACK.match(str(error)) or (ours and isinstance(error, ValueError))):
        return text
    where = f" ({last.filename}:{last.lineno})" if last is not None else ""
    return f"{type(error).__name__}{': ' if text else ''}{text}{where}"
