"""The documents: every link and anchor leads somewhere, and the commands of the pages run (`page_script` says how)."""

from __future__ import annotations

import contextlib
import importlib
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer
import typer.main
from load import seconds
from page_script import FENCE, run_page, script_of
from prometheus_client.parser import text_string_to_metric_families
from sources import PACKAGES, ROOT, SOURCES, files

from netfold.cli import app
from netfold.switch.metrics import PACKET_KINDS, exposition

PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "lab" / "bench" / "results").glob("*.md")])
# Every page with a block that readers run, and that can run on one machine.
RUN_PAGES = [
    page
    for page in PAGES
    if any(
        mark == "run" or (language == "shell" and not mark.startswith("not run: "))
        for mark, language, _ in FENCE.findall(page.read_text())
    )
]
# They start whole jobs. The other pages take a minute together.
JOBS = ("README", "tutorials/", "security", "benchmarks", "tune", "plan/", "profile", "train/")


def slugs(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub and MyST write them."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    found: set[str] = set()
    for heading in re.findall(r"^#+ (.+)$", text, re.MULTILINE):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).strip()
        slug = re.sub(r"[^\w\- ]", "", plain.lower()).replace(" ", "-")
        found.add(slug if slug not in found else f"{slug}-1")
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_to_a_file_and_a_heading(page: Path) -> None:
    text = re.sub(r"^```.*?^```$|`[^`\n]*`", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path) if path else page
        if not file.exists() or (anchor and file.suffix == ".md" and anchor not in slugs(file)):
            broken.append(target)
    assert not broken


def names_in_sources(pattern: str) -> set[str]:
    """Return every text of the sources and pages, but the change log, that matches the expression."""
    folders = {*PACKAGES, "tests", "examples", "tools"}
    names = set()
    for path in files():
        if path.parts[0] in folders or (path.suffix == ".md" and path.name != "CHANGELOG.md"):
            names.update(found[0] for found in re.finditer(pattern, (ROOT / path).read_text("utf-8", "replace")))
    return names


def test_doc_files_named_in_sources_exist() -> None:
    names = names_in_sources(r"\bdocs/[a-z_/-]+\.(md|svg)\b")
    assert names and not sorted(name for name in names if not (ROOT / name).exists())


def test_native_files_named_in_sources_exist() -> None:
    """A header is named as the code includes it, any other file by its path."""
    headers = names_in_sources(r"\bnetfold/[a-z_]+/[a-z_/]+\.hpp\b")
    assert headers and not [name for name in headers if not any((ROOT / "core" / "native").glob(f"**/include/{name}"))]
    files = names_in_sources(r"\bcore/native/[a-z_/]+\.[ch]pp\b")
    assert files and not sorted(name for name in files if not (ROOT / name).exists())


def test_paths_that_the_architecture_names_exist() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text()
    paths = re.findall(r"`([\w-]+(?:/[\w.-]+)+)`", text)
    bases = (ROOT, ROOT / "core", ROOT / "core/src/netfold", ROOT / "core" / "native")
    assert paths and not [path for path in paths if not any((base / path).exists() for base in bases)]


def test_every_metric_of_a_switch_is_on_its_page() -> None:
    job: dict[str, Any] = {"id": "1", "name": "a", "tenant": "b", "joined": 2, "memory_bytes": 9, "retransmissions": 1}
    counters = dict.fromkeys(("slots", "slots_collecting", "result_bytes", "sums_resent"), 3)
    job["counters"] = {**counters, **dict.fromkeys(PACKET_KINDS.values(), 5), "drops": {"stale": 8}}
    ranks = [{"rank": 0, "ranks_below": 0, "arrivals": 7, "lag_s": 1e-9, "last": 1}]
    job |= {"capacity_bytes_per_s": 1.0, "ranks": ranks}
    status: dict[str, Any] = {"state": "serving", "authenticated": True, "jobs": [job], "parent": {"endpoint": "c"}}
    status["parent"]["jobs"] = 1
    status |= dict.fromkeys(("connections", "unauthenticated_connections", "jobs_started", "uptime_s", "cpu_s"), 1)
    status |= dict.fromkeys(("memory_granted_bytes", "memory_free_bytes"), 1)
    status |= {"totals": {"result_bytes": 1, "drops": {"stale": 8}}, "refusals": {"full": 1}, "fabrics": {"tcp": 1}}
    status["tenants"] = [{"name": "b", "memory_granted_bytes": 1, "memory_free_bytes": 1}]
    families = list(text_string_to_metric_families(exposition(status).decode()))
    assert len(families) == 30 and all(family.samples for family in families)
    page = (ROOT / "docs" / "reference" / "metrics.md").read_text()
    assert not [family.name for family in families if not re.search(rf"`{family.name}(_total)?[`{{]", page)]


def test_every_event_of_a_switchs_log_is_on_its_page() -> None:
    page = (ROOT / "docs" / "reference" / "log-events.md").read_text()
    events = set()
    for source in (ROOT / "core/src/netfold" / "switch").glob("*.py"):
        events |= set(re.findall(r'event\(\s*logging\.\w+,\s*"(\w+)"', source.read_text()))
    assert events and not sorted(name for name in events if f"| `{name}` |" not in page)


def test_every_public_name_is_on_the_page_of_the_interface() -> None:
    page = (ROOT / "docs" / "reference" / "api.md").read_text()
    missing = [
        f"{module}.{name}"
        for module in ("netfold", "netfold.elastic", "netfold_train")
        for name in importlib.import_module(module).__all__
        if not re.search(rf":: {module}\.{name}$|`{name}`", page, re.MULTILINE)
    ]
    assert missing == ["netfold.__version__", "netfold.profile"]  # a module, which has a page of its own


def test_error_texts_that_pages_quote_are_in_the_source() -> None:
    sources = [
        *(file for folder in SOURCES for file in folder.rglob("*.py")),
        *(ROOT / "core" / "native").rglob("*.cpp"),
        *(ROOT / "core" / "native").rglob("*.hpp"),
    ]
    # Join string literals that go on in the next line.
    code = re.sub(r'"\s+f?"', "", "\n".join(source.read_text() for source in sources))
    table = (ROOT / "docs" / "how-to" / "troubleshoot.md").read_text().split("## By error text")[1]
    cells = re.findall(r"^\| (`[^|]+) \|", table, re.MULTILINE)
    quotes = [quote for cell in cells for quote in re.findall(r"`([^`]+)`", cell) if not quote.startswith("NETFOLD_")]
    of_torch = ["terminate called without an active exception", "failed to find backend netfold"]
    assert quotes[-2:] == of_torch and len(quotes) > 10
    quotes[-2:] = re.findall(r"`(the endpoint was closed: [^`]+)`", (ROOT / "docs/how-to/fabric.md").read_text())
    parts = [part for quote in quotes for part in re.split(r" ?\.\.\. ?|(?<=closed): ", quote)]
    assert not [part for part in parts if part not in code]


def test_every_page_is_in_a_table_of_contents() -> None:
    listed = set()
    for page in (ROOT / "docs").rglob("*.md"):
        for tree in re.findall(r"^```{toctree}\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL):
            for line in tree.splitlines():
                if line and not line.startswith(":"):
                    name = re.sub(r".*<(.+)>", r"\1", line)
                    listed.add((page.parent / f"{name}.md").resolve())
    pages = {page.resolve() for page in (ROOT / "docs").rglob("*.md")} - {ROOT / "docs" / "index.md"}
    pages |= set((ROOT / "lab" / "bench" / "results").glob("*.md"))
    assert not sorted(str(page.relative_to(ROOT)) for page in pages - listed)
    assert all(page.exists() for page in listed)


# A line that begins with one of these, or with a variable's value before it, is a command.
PROGRAMS = r"netfold(?! switch listening)|make|torchrun|python3?|\.venv/bin/\w+|srun|mpirun|pip|export|sysctl|ip|eval"
COMMAND = re.compile(
    r"^ *(?:[\w-]*[$#] +)?((?:[A-Z_]+=\S+ +)*netfold [a-z-].*)$|`((?:[A-Z_]+=\S+ )*netfold [a-z-][^`]*)`", re.M
)


def netfold_commands(page: Path) -> list[list[str]]:
    """The words behind `netfold` of each command of a page, in a block or in a line of text."""
    commands = []
    for block, inline in COMMAND.findall(page.read_text().replace("\\\n", " ")):
        # A sentence that begins with the name at a line's start is no command.
        with contextlib.suppress(ValueError):
            words = shlex.split((block or inline).replace("\n", " "), comments=True)
            words = words[words.index("netfold") + 1 :]
            ends = [index for index, word in enumerate(words) if re.match(r"&|\||;|·|\[|\d?[<>]", word)]
            commands.append(words[: ends[0]] if ends else words)
    return commands


def test_the_command_line_takes_every_command_of_every_page() -> None:
    """Verbs, options and values are parsed, as far as parsing needs no file; nothing runs."""
    root = typer.main.get_command(app)
    refused = []
    count = 0
    for page in PAGES:
        for words in [] if page.name == "CHANGELOG.md" else netfold_commands(page):
            if words[0] not in root.commands:  # type: ignore[attr-defined]
                continue
            count += 1
            context, command, rest = None, root, ["netfold", *words]
            try:
                while rest:
                    context = command.make_context(rest[0], rest[1:], parent=context)
                    rest = [*context._protected_args, *context.args]
                    command = getattr(command, "commands", {}).get(rest[0]) if rest else None
                    if command is None:
                        break
            except typer.Exit:
                continue
            except Exception as error:
                # A page may name a verb without its arguments.
                if type(error).__name__ in ("MissingParameter", "NoArgsIsHelpError", "BadOptionUsage"):
                    continue
                refused.append(f"{page.relative_to(ROOT)}: netfold {' '.join(words)}: {error}")
    assert not refused
    assert count > 200


@pytest.mark.parametrize(
    ("commands", "failures"),
    [
        ("true\nsleep 60 & \ntrue\n", []),
        ("sleep 60 &\nkill %1\n", ["failed in the background: sleep 60"]),
        ("(trap 'exit 0' TERM; while sleep 0.1; do :; done) &\nsleep 0.5\nkill %1\n", []),
        ("false\ntrue\n", ["failed: false"]),
        ("false | cat\n", ["failed: cat"]),
        ('echo "$(false)" > file\n', ["failed: false"]),
        ("echo $missing\n", ["the script's exit status is 1"]),
        ("false &\nsleep 0.5\ntrue\n", ["failed in the background: false"]),
        ("false & sleep 0.5; true", ["failed in the background: false"]),
        ("ls missing > out 2> log &\nsleep 0.5\nls out\n", ["failed in the background: ls missing > out 2> log"]),
        ('cd ~ && ls -A && test -z "$(ls -A)"\n', []),
    ],
)
def test_a_page_fails_with_any_of_its_commands(commands: str, failures: list[str], tmp_path: Path) -> None:
    folder = tmp_path / "page"
    folder.mkdir()
    script = script_of(f"```shell\n{commands.rstrip()}\n```\n", folder)
    assert run_page(script, folder, seconds(20))[0] == failures


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_command_of_a_page_is_in_a_block_that_runs_or_says_why_not(page: Path) -> None:
    """Results quote what ran; every other page has its commands in fenced `shell` blocks alone."""
    if page.parent.name == "results":
        return
    text = page.read_text()
    assert not [language for _, language, _ in FENCE.findall(text) if language in ("bash", "sh", "console")]
    outside = FENCE.sub("", text)
    assert not re.findall(rf"^ {{4,}}(?:[\w-]*[$#] +)?(?:[A-Z_]+=\S+ +)*(?:{PROGRAMS}) .*", outside, re.MULTILINE)


@pytest.mark.torch
@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=pytest.mark.jobs)
        if any(part in str(page.relative_to(ROOT)) for part in JOBS)
        else page
        for page in RUN_PAGES
    ],
    ids=lambda page: str(page.relative_to(ROOT)),
)
def test_the_commands_of_a_page_run(page: Path, tmp_path: Path) -> None:
    folder = tmp_path / "page"
    folder.mkdir()
    # Guides and references are for readers who have a script of their own.
    first_job = (ROOT / "docs" / "tutorials" / "first-job.md").read_text()
    if page.parent.name != "tutorials":
        script_of(first_job, folder)
    script = script_of(page.read_text(), folder)
    failures, output = run_page(script, folder, seconds(240))
    assert not failures, f"{failures}\n{output}"


def test_results_name_no_folder_of_the_machine_that_measured_them() -> None:
    for page in sorted((ROOT / "lab" / "bench" / "results").glob("*.*")):
        if page.suffix in (".md", ".json"):
            found = re.findall(
                rf"{re.escape(str(ROOT))}\S{{0,40}}|/[\w.-]+/\S{{0,60}}\.venv\S{{0,40}}", page.read_text()
            )
            assert not found, f"{page.name}: {found[:3]}"


@pytest.mark.parametrize("picture", sorted((ROOT / "docs").glob("*.svg")), ids=lambda picture: picture.name)
def test_a_picture_has_no_dark_text_on_a_dark_page(picture: Path) -> None:
    text = picture.read_text()
    dark = re.findall(r"^ *@media \(prefers-color-scheme: dark\) \{(.*?)^ *\}$", text, re.MULTILINE | re.DOTALL)
    assert dark and '[fill="#ffffff"]' in dark[0]
    colours = set(re.findall(r'<(?:text|g)\b[^>]* fill="(#[0-9a-f]{6})"', text))
    is_dark = {colour for colour in colours if max(int(colour[at : at + 2], 16) for at in (1, 3, 5)) < 0x70}
    assert not [colour for colour in is_dark if f'[fill="{colour}"]' not in dark[0]]
    unfilled = [mark for mark in re.findall(r"<text\b[^>]*>", text) if "fill=" not in mark]
    assert not unfilled or "text:not([fill])" in dark[0]
