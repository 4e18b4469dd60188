"""The layout: import rules of both layers, and pages that list variables and packages."""

from __future__ import annotations

import ast
import re
import subprocess
import sys

from load import seconds
from sources import ROOT, SOURCES, files


def test_only_bind_includes_python() -> None:
    for source in (ROOT / "core" / "native").rglob("*.[ch]pp"):
        if source.parent.name != "bind":
            assert not re.search(r"#include <(nanobind|Python)", source.read_text()), source


def test_native_code_waits_by_the_steady_clock() -> None:
    """netfold/transport/condition.hpp says why. The standard library's other waits with a time have the same flaw."""
    forbidden = re.compile(
        r"std::(condition_variable|timed_mutex|recursive_timed_mutex|shared_timed_mutex)|"
        r"system_clock|sleep_until\(|CLOCK_REALTIME"
    )
    for source in (ROOT / "core" / "native").rglob("*.[ch]pp"):
        code = re.sub(r"//.*", "", source.read_text())
        assert not forbidden.search(code), (source, forbidden.search(code))


def test_python_packages_import_only_what_they_may() -> None:
    run = subprocess.run(
        [sys.executable, "-c", "from importlinter.cli import lint_imports_command as c; c()", "--no-cache"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=seconds(120),
    )
    assert run.returncode == 0, run.stdout + run.stderr


def test_every_environment_variable_is_on_the_page() -> None:
    page = (ROOT / "docs" / "reference" / "environment.md").read_text()
    options = (ROOT / "core/src/netfold/options.py").read_text()
    fields = re.findall(r"^    (\w+): [\w |]+ = None$", options, re.M)
    assert fields, "options.py has changed its shape"
    used = {f"NETFOLD_{field.upper()}" for field in fields}
    folders = [*((folder, "*.py") for folder in SOURCES), (ROOT / "core" / "native", "*.cpp")]
    for source in [file for folder, kind in folders for file in folder.rglob(kind)]:
        used |= set(re.findall(r"[\"(](NETFOLD_[A-Z_]+)\b", source.read_text()))
    missing = sorted(name for name in used if f"`{name}`" not in page)
    assert not missing, missing


def test_every_package_has_a_docstring() -> None:
    for package in [path for folder in SOURCES for path in (*folder.glob("*/"), *folder.glob("*/*/"))]:
        if (package / "__init__.py").exists():
            text = (package / "__init__.py").read_text()
            assert text.startswith('"""') and len(text.split('"""')[1]) > 30, package


def test_test_files_have_unique_names() -> None:
    # pytest imports a test file by its name, without its folder.
    names = [path.name for path in files() if path.match("test_*.py")]
    assert sorted(names) == sorted(set(names))


# Of these the first argument or `timeout` is a limit in seconds. `load.seconds` and `load.run` make it follow the load.
_WAITS = {"wait", "join", "result", "settimeout", "communicate", "run", "check_call", "check_output"}
# Programs of their own, whose limits belong to what they measure.
_PROGRAMS = ("lab/tests/chaos/", "core/tests/conformance/", "core/tests/torch/probe_")


def test_no_test_limits_a_wait_by_seconds_of_a_quiet_machine() -> None:
    fixed = []
    for path in files():
        name = str(path)
        if path.suffix != ".py" or "tests" not in path.parts or name.startswith(_PROGRAMS) or name == "tests/load.py":
            continue
        for call in ast.walk(ast.parse((ROOT / path).read_text())):
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr in _WAITS:
                limits = [word.value for word in call.keywords if word.arg == "timeout"] + call.args[:1]
                numbers = [limit.value for limit in limits if isinstance(limit, ast.Constant)]
                # Below a second a wait is a pause, and its end no failure.
                if any(isinstance(number, int | float) and number >= 1 for number in numbers if number is not True):
                    fixed.append(f"{name}:{call.lineno}: {ast.unparse(call)[:80]}")
    assert fixed == [], "write load.seconds(LIMIT) or load.run(COMMAND, LIMIT)"
