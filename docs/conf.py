"""The site of the documents: `make docs` writes it into build/docs.

The source folder is the repository: relative links of a page are the same on the site and in a checkout. Docstrings
are plain text: `plain_docstring` turns them into reStructuredText. `complete_page` writes the options of `netfold`
into docs/reference/command-line.md.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import click
import typer.main

from netfold.cli import app as netfold_command

project = "netfold"
author = copyright = "The netfold authors"
extensions = ["myst_parser", "sphinx.ext.autodoc"]
root_doc = "docs/index"
include_patterns = ["docs/**", "lab/bench/results/*.md", "*.md", "*/README.md"]
exclude_patterns = [".*", "build*", "dist", "**/src", "netfold-demo", "lab/bench/results/figures"]

html_theme = "furo"
html_title = "netfold"
# The search reads searchindex.js; summaries would fetch pages, which browsers refuse for file://.
html_show_search_summary = False
html_copy_source = False
html_static_path = ["site.css"]
html_css_files = ["site.css"]

myst_heading_anchors = 4
# Results and the change log begin sections where their writers need them.
suppress_warnings = ["myst.header"]

autodoc_typehints = "signature"
# Without it a default such as os.environ shows the environment of the machine that builds the site.
autodoc_preserve_defaults = True
autodoc_member_order = "bysource"
autodoc_class_signature = "mixed"
autodoc_inherit_docstrings = False


def inline(text: str) -> str:
    """Quote what reStructuredText would read as markup; single backquotes mean code."""
    parts = re.split(r"(``?[^`]+``?)", text)
    for index, part in enumerate(parts):
        if index % 2:
            parts[index] = f"``{part.strip('`')}``"
        else:
            parts[index] = re.sub(r"([\\*|`])|(?<=\w)(_)(?!\w)", lambda found: "\\" + found[0], part)
    # A literal needs a boundary on both sides.
    joined = ""
    for index, part in enumerate(parts):
        if index % 2:
            before = "" if not joined or joined[-1] in " ([{-/:'\"<\n" else "\\ "
            following = parts[index + 1][:1]
            after = "" if not following or following in " )]}-/:.,;!?'\">\n" else "\\ "
            part = f"{before}{part}{after}"
        joined += part
    return joined


def plain_docstring(app: Any, what: str, name: str, value: Any, options: Any, lines: list[str]) -> None:
    """Paragraphs stay; `name: text` becomes a list item; an indented block becomes literal."""
    blocks: list[list[str]] = [[]]
    for line in lines:
        if line.strip():
            blocks[-1].append(line)
        else:
            blocks.append([])
    result: list[str] = []
    for block in filter(None, blocks):
        if all(line.startswith("    ") for line in block):
            # Blank lines within one literal block start a new one, which reads the same.
            result += ["::", "", *(f"    {line}" for line in block), ""]
            continue
        item, literal = False, False
        for line in block:
            indented = line.startswith("  ")
            begins = re.match(r"[\w*`., ]{1,40}: ", line) is not None or line.startswith("- ")
            if not indented and begins:
                if not item and result and result[-1]:
                    result.append("")
                result.append(f"- {inline(line.removeprefix('- '))}")
                item, literal = True, False
            elif indented and not item:
                if not literal:
                    result += ["", "::", ""]
                result.append(f"    {line}")
                literal = True
            elif indented:
                result.append(f"  {inline(line.strip())}")
            else:
                if item or literal:
                    result.append("")
                item = literal = False
                result.append(inline(line))
        result.append("")
    lines[:] = result


def options_of(command: click.Command, path: str, level: int, shown: dict[tuple[str, ...], str]) -> list[str]:
    """The Markdown section of a command and of its subcommands.

    shown: by rows of options, the first command that has them.
    """
    text = [f"{'#' * level} {path}", "", " ".join((command.help or "").split()), ""]
    rows = []
    context = click.Context(command)
    for parameter in command.get_params(context):
        record = parameter.get_help_record(context)
        if parameter.param_type_name == "argument":
            names, help_text = (parameter.name or "").upper(), getattr(parameter, "help", None) or ""
        elif record is None or "--help" in parameter.opts:
            continue
        else:
            names, help_text = record
        cells = [f"`{names}`", " ".join(help_text.split())]
        rows.append("| " + " | ".join(re.sub(r"(?<!\\)\|", r"\\|", cell) for cell in cells) + " |")
    if tuple(rows) in shown:
        text += [f"The options are those of `{shown[tuple(rows)]}`.", ""]
    elif rows:
        text += ["| option | meaning |", "|---|---|", *rows, ""]
        if len(rows) > 3:
            shown[tuple(rows)] = path
    # typer has a copy of click's group class in newer releases.
    for name, child in sorted(getattr(command, "commands", {}).items()):
        if not child.hidden:
            text += options_of(child, f"{path} {name}", min(level + 1, 4), shown)
    return text


def complete_page(app: Any, document: str, source: list[str]) -> None:
    """Write the options of `netfold` into their page, and a title above each table of results that has none."""
    if document == "docs/reference/command-line":
        sections = "\n".join(options_of(typer.main.get_command(netfold_command), "netfold", 2, {}))
        source[0] = source[0].replace("<!-- options -->", sections)
    if document.startswith("lab/bench/results/") and not source[0].startswith("# "):
        index = (Path(app.srcdir) / "docs/reference/measurements.md").read_text()
        title = re.search(rf"^(.+) <../../{document}>$", index, re.MULTILINE)
        source[0] = f"# {title[1] if title else document}\n\n{source[0]}"


def redirect(app: Any, error: Exception | None) -> None:
    """build/docs/index.html leads to the first page."""
    if error is None:
        target = "docs/index.html"
        page = f'<!doctype html><meta http-equiv="refresh" content="0; url={target}"><a href="{target}">netfold</a>\n'
        (Path(app.outdir) / "index.html").write_text(page)


def setup(app: Any) -> None:
    app.connect("autodoc-process-docstring", plain_docstring)
    app.connect("source-read", complete_page)
    app.connect("build-finished", redirect)
