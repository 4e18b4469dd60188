"""Open a page in a headless Chromium: the document after its scripts ran, and its text."""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path

import pytest
from load import seconds

CHROMIUM = next(
    (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), None
)
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="no chromium (Debian: apt-get install chromium)")
# Opening takes less than a second on an idle machine; a busy machine may need longer.
TIMEOUT_S = 60
_VOID = {"meta", "br", "link", "img", "input", "hr", "source", "wbr", "col"}


@dataclass
class Element:
    tag: str
    attributes: dict[str, str] = field(default_factory=dict)
    children: list[Element | str] = field(default_factory=list)

    @property
    def text(self) -> str:
        """All of its text, white space as it is shown."""
        return " ".join("".join(self._texts()).split())

    def _texts(self) -> list[str]:
        return [text for child in self.children for text in ([child] if isinstance(child, str) else child._texts())]

    def all(self, tag: str = "", **attributes: str) -> list[Element]:
        """Everything below of this tag and with these attributes; `class_` stands for class, and may be one of many."""
        found = []
        for child in self.children:
            if isinstance(child, Element):
                if (not tag or child.tag == tag) and child._has(attributes):
                    found.append(child)
                found += child.all(tag, **attributes)
        return found

    def _has(self, attributes: dict[str, str]) -> bool:
        return all(
            value in self.attributes.get("class", "").split()
            if name == "class_"
            else self.attributes.get(name) == value
            for name, value in attributes.items()
        )

    def one(self, tag: str = "", **attributes: str) -> Element:
        (only,) = self.all(tag, **attributes)
        return only

    def rows(self, table: str) -> list[list[Element]]:
        """The cells of a table's body, by its id."""
        body = self.one("table", id=table).one("tbody")
        return [[cell for cell in row.children if isinstance(cell, Element)] for row in body.all("tr")]


class _Parser(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.root = Element("")
        self._open = [self.root]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        element = Element(tag, {name: value or "" for name, value in attrs})
        self._open[-1].children.append(element)
        if tag not in _VOID:
            self._open.append(element)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._open[-1].children.append(Element(tag, {name: value or "" for name, value in attrs}))

    def handle_endtag(self, tag: str) -> None:
        if tag in (element.tag for element in self._open):
            while self._open.pop().tag != tag:
                pass

    def handle_data(self, data: str) -> None:
        self._open[-1].children.append(data)


def parse(page: str) -> Element:
    parser = _Parser()
    parser.feed(page)
    return parser.root


def opened(page: str, folder: Path, *, then: str = "", width: int = 1280) -> Element:
    """The page's document in a browser, after its scripts and then a script of the test's own ran."""
    if then:
        # The page lets no script but its own run; this one is let in by taking the policy away.
        page, times = re.subn(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", page)
        assert times == 1
        page = page.replace("</body>", f"<script>{then}</script></body>")
    file = folder / "page.html"
    file.write_text(page, encoding="utf-8")
    assert CHROMIUM is not None
    command = [CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder / 'browser'}"]
    command += [f"--window-size={width},900", "--dump-dom", file.as_uri()]
    run = subprocess.run(command, capture_output=True, text=True, timeout=seconds(TIMEOUT_S))
    assert run.returncode == 0, run.stderr
    return parse(run.stdout)
