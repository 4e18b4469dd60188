"""Words that must not come back: metaphors for things with a standard name, such as a NACK or a generation."""

from __future__ import annotations

import re
from pathlib import Path

from sources import ROOT, files

# Each word with the standard one in its place.
WORDS = {
    r"at home|caretakers?|doors?|house|residents?|wardens?": "listener, connection manager, module, reaper",
    r"bells?": "doorbell",
    r"errands?": "driver task",
    r"folds?": "reduce",
    r"gone over": "transport",
    r"heard|news": "event, remote reason",
    r"knock(s|ed|ing)?": "connect",
    r"lent": "exported",
    r"(lie|lies|lay|lying) down|(get|gets|got) up|naps?": "sleep, poll timer",
    r"life": "generation, lifetime",
    r"mend(s|ed|ing)?": "reconnect, correct",
    r"mourn(s|ed|ing)?": "grace period",
    r"sever(s|ed|ing)?": "disconnect",
    r"speakers?": "leader, stream",
    r"strangers?": "unauthenticated peer",
    r"trouble": "path error, problem",
}
FOUND = re.compile(r"\b(?:" + "|".join(f"(?:{word})" for word in WORDS) + r")\b", re.IGNORECASE)

# Results of former versions, the fuzzers' random text, and this list.
NOT_COVERED = (
    "lab/bench/results/",
    "core/tests/fuzz/corpus/",
    "tests/test_words.py",
)

# The same word with another meaning.
ALLOWED = {
    ("docs/how-to/fabric.md", "resident"): "resident memory",
    ("core/src/netfold/diagnostics/top.py", "fold"): "a value of rich",
}


def sources() -> list[Path]:
    kinds = {".py", ".cpp", ".hpp", ".md", ".toml", ".yml", ".sh", ".txt", ""}
    return [path for path in files() if path.suffix in kinds]


def test_old_words_do_not_come_back() -> None:
    hits = []
    for path in sources():
        if str(path).startswith(NOT_COVERED) or not (ROOT / path).is_file():
            continue
        for number, line in enumerate((ROOT / path).read_text(errors="replace").splitlines(), 1):
            for found in FOUND.finditer(line):
                if (str(path), found[0].lower()) not in ALLOWED:
                    hits.append(f"{path}:{number}: {found[0]}")
    assert not hits, "use a standard word:\n" + "\n".join(hits)


def test_no_docstring_opens_with_a_relative_clause() -> None:
    """A docstring names the thing itself: "The chunks that a rank has", not "What a rank has"."""
    opens = re.compile(r'"{3}(?:What|Which|Why|How|Where|Who|When|That)\b.*')
    hits = [
        f"{path}: {found[0]}"
        for path in sources()
        for found in opens.finditer((ROOT / path).read_text("utf-8", "replace"))
    ]
    assert not hits, "\n".join(hits)


def test_every_exception_is_needed() -> None:
    for (path, word), _ in ALLOWED.items():
        assert re.search(rf"\b{word}\b", (ROOT / path).read_text(), re.IGNORECASE), f"{path} has no {word}"
