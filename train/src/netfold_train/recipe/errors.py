"""Errors of a recipe: sentences, each about a key, with the file and line where the key was written."""

from __future__ import annotations

import re
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import get_args

from pydantic import ValidationError
from pydantic_core import ErrorDetails

import netfold
import netfold_plan
from netfold_plan.request.key_lines import Key, line_of
from netfold_plan.words import suggest
from netfold_train.recipe import Recipe

# A key in a sentence, but not a part of a file's name such as .../data.txt.
_KEY = re.compile(rf"(?<![\w/.-])(?:{'|'.join(Recipe.model_fields)})(?:\.[a-z_]+)+")
# torch's text around the error of a communication hook's future.
_CALLBACK = re.compile(r"^Got the following error when running the callback: (.*?)\s+At:\s.*$", re.DOTALL)
# netfold and its packages beside this one.
_OURS = [Path(module.__file__ or "").parent for module in (netfold, netfold_plan)] + [Path(__file__).parents[1]]
# For the key of each table: its name in a sentence, and the keys that it may hold.
Tables = Mapping[Key, tuple[str, Sequence[str]]]
_SECTIONS = {
    name: (get_args(field.annotation) or (field.annotation,))[0] for name, field in Recipe.model_fields.items()
}
RECIPE_TABLES: Tables = {
    (): ("a recipe", list(_SECTIONS)),
    **{(name,): (f"[{name}]", list(section.model_fields)) for name, section in _SECTIONS.items()},
}


class RecipeError(ValueError):
    """A recipe that cannot be trained. Each of `problems` is one line: where, which key, what is wrong, what to do."""

    def __init__(self, problems: Sequence[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = tuple(problems)


@dataclass(frozen=True)
class Source:
    """The place where each key of a recipe was written."""

    file: Path | None = None
    """None: the recipe was made in Python."""
    lines: Mapping[Key, int] = field(default_factory=dict)
    settings: Mapping[Key, str] = field(default_factory=dict)
    """Each --set: its key, and its whole text. Settings override the file."""

    def placed(self, error: ValueError) -> list[str]:
        """The sentences of an error; a sentence about a recipe's key begins with the key's place."""
        if isinstance(error, RecipeError):
            return [self.place(sentence) + sentence for sentence in error.problems]
        sentence = error_sentence(error)
        return [(self.place(sentence) if _KEY.search(sentence) else "") + sentence]

    def place(self, sentence: str, key: Key | None = None) -> str:
        """Return where `key` was written, or else the first key of the sentence that was written anywhere.

        Returns "recipe.toml:12: ", "--set training.batch=3: ", or "recipe.toml: " if there is no line.
        """
        named = [key] if key is not None else [tuple(text.split(".")) for text in _KEY.findall(sentence)]
        for each in named:
            for key, setting in self.settings.items():
                if key[: len(each)] == each[: len(key)]:
                    return f"--set {setting}: "
            if each in self.lines:
                return f"{self.file}:{self.lines[each]}: "
        # A missing key, or one with its default value: take the line of its table.
        line = next((line for each in named if (line := line_of(each, self.lines)) is not None), None)
        return "" if self.file is None else f"{self.file}: " if line is None else f"{self.file}:{line}: "


def validation_sentences(error: ValidationError, tables: Tables = RECIPE_TABLES) -> list[tuple[Key, str]]:
    """(key, sentence) for each wrong key, in pydantic's order. A sentence about several keys has the key ()."""
    found: dict[Key, list[ErrorDetails]] = {}
    for each in error.errors(include_url=False):
        key: Key = ()
        for part in each["loc"]:
            # Behind a value's key pydantic names the member of a union and places in a list.
            if key in tables:
                key = (*key, str(part))
        found.setdefault(key, []).append(each)
    return [
        (key, ".".join(key) + words)
        for key, details in found.items()
        for words in _problem(key, details, tables).splitlines()
    ]


def _problem(key: Key, details: Sequence[ErrorDetails], tables: Tables) -> str:
    """The text behind the key's name."""
    first = details[0]
    if first["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
        owner, known = tables[key[:-1]]
        return f" is not a key of {owner}; {suggest(key[-1], known) if known else 'it has none'}"
    if first["type"].startswith("missing") and len(first["loc"]) == len(key):
        return " is missing, and has no default"
    if first["type"] == "value_error":
        # The sentences of a validator; those about several sections name their keys themselves.
        return f"{': ' if key else ''}{first['ctx']['error']}"
    shown = "a table" if isinstance(first["input"], Mapping) else repr(first["input"])
    shown = shown.lower() if isinstance(first["input"], bool) else shown
    if first["type"] in ("model_type", "model_attributes_type", "dict_type"):
        return f" is {shown}; it must be a table"
    # pydantic names Python's class of a path.
    messages = list(dict.fromkeys(each["msg"].removesuffix(" for <class 'pathlib.Path'>") for each in details))
    wanted = [message.removeprefix("Input should be ").removeprefix("Input is not ") for message in messages]
    if any(message in wanted for message in messages):
        # A message about a part of the value, such as the length of a list.
        return f" is {shown}: {'; '.join(messages)}"
    return f" is {shown}; it must be {' or '.join(wanted)}"


def error_text(error: BaseException) -> str:
    """The error's text, without torch's text and stack around the error of a communication hook."""
    return _CALLBACK.sub(r"\1", str(error))


def error_kind(error: BaseException) -> str:
    """The name of the error's class. torch keeps only the text of a hook's error, so its class is read from there."""
    hook = _CALLBACK.match(str(error))
    first = hook.group(1).partition(":")[0] if hook else ""
    return first if first.isidentifier() else type(error).__name__


def error_sentence(error: BaseException) -> str:
    """The text of netfold's own ValueErrors; other errors with their type, and the line that raised them."""
    text = " ".join(error_text(error).split())
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    last = next(iter(traceback.extract_tb(error.__traceback__)[-1:]), None)
    ours = last is None or any(Path(last.filename).is_relative_to(folder) for folder in _OURS)
    if text and (_CALLBACK.match(str(error)) or (ours and isinstance(error, ValueError))):
        return text
    where = f" ({last.filename}:{last.lineno})" if last is not None else ""
    return f"{type(error).__name__}{': ' if text else ''}{text}{where}"
