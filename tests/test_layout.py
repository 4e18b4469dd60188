"""The layout: import rules of both layers, and pages that list variables and packages."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

from load import seconds

ROOT = Path(__file__).parent.parent

MAY_INCLUDE = {
    "kernels": set(),
    "auth": set(),
    "transport": {"auth"},
    "protocol": {"kernels"},
    "dev/model_check": {"protocol"},
    "collective": {"protocol", "transport", "auth", "kernels"},
    # Headers that the headers of collective include.
    "engine": {"collective", "protocol", "transport", "auth", "kernels"},
    "device": {"engine", "collective", "protocol", "transport", "auth", "kernels"},
    "dataplane": {"protocol", "transport", "auth"},
    "control": {"collective", "protocol", "transport", "auth"},
    "nccl": {"device", "engine", "control", "collective", "transport", "auth", "kernels"},
    "dev/delay_link": {"transport"},
    "bind": {"kernels", "transport", "auth", "protocol", "collective", "engine", "device", "dataplane", "control"},
    # P4: it includes nothing of C++.
    "p4": set(),
    # The bindings' conversions include protocol.
    "dev/bind": {"model_check", "delay_link", "control", "collective", "protocol", "transport", "auth"},
}


def test_native_components_include_only_what_they_may() -> None:
    broken = []
    for folder, allowed in MAY_INCLUDE.items():
        name = folder.rsplit("/", 1)[-1]
        for source in (ROOT / "core" / "native" / folder).rglob("*.[ch]pp"):
            for other in re.findall(r"#include <netfold/(\w+)/", source.read_text()):
                if other != name and other not in allowed:
                    broken.append(f"{source.relative_to(ROOT)} includes {other}")
    assert not broken, broken
    components = {path.name for path in (ROOT / "core" / "native").iterdir() if path.is_dir() and path.name != "dev"}
    components |= {f"dev/{path.name}" for path in (ROOT / "core" / "native" / "dev").iterdir() if path.is_dir()}
    assert components == set(MAY_INCLUDE)


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
    folders = ((ROOT / "src", "*.py"), (ROOT / "examples" / "netfold_lab.demo", "*.py"), (ROOT / "core" / "native", "*.cpp"))
    for source in [file for folder, kind in folders for file in folder.rglob(kind)]:
        used |= set(re.findall(r"[\"(](NETFOLD_[A-Z_]+)\b", source.read_text()))
    missing = sorted(name for name in used if f"`{name}`" not in page)
    assert not missing, missing


def test_every_package_has_a_docstring() -> None:
    for package in [*(ROOT / "core/src/netfold").iterdir(), ROOT / "examples" / "netfold_lab.demo"]:
        if (package / "__init__.py").exists():
            text = (package / "__init__.py").read_text()
            assert text.startswith('"""') and len(text.split('"""')[1]) > 80, package


def test_test_files_have_unique_names() -> None:
    # pytest imports a test file by its name, without its folder.
    names = [path.name for path in (ROOT / "tests").rglob("test_*.py")]
    assert sorted(names) == sorted(set(names))


# Of these the first argument or `timeout` is a limit in seconds. `load.seconds` and `load.run` make it follow the load.
_WAITS = {"wait", "join", "result", "settimeout", "communicate", "run", "check_call", "check_output"}
# Programs of their own, whose limits belong to what they measure.
_PROGRAMS = ("lab/tests/chaos/", "core/tests/conformance/", "core/tests/torch/probe_")


def test_no_test_limits_a_wait_by_seconds_of_a_quiet_machine() -> None:
    fixed = []
    for path in sorted((ROOT / "tests").rglob("*.py")):
        name = str(path.relative_to(ROOT))
        if name.startswith(_PROGRAMS) or name == "tests/load.py":
            continue
        for call in ast.walk(ast.parse(path.read_text())):
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr in _WAITS:
                limits = [word.value for word in call.keywords if word.arg == "timeout"] + call.args[:1]
                numbers = [limit.value for limit in limits if isinstance(limit, ast.Constant)]
                # Below a second a wait is a pause, and its end no failure.
                if any(isinstance(number, int | float) and number >= 1 for number in numbers if number is not True):
                    fixed.append(f"{name}:{call.lineno}: {ast.unparse(call)[:80]}")
    assert fixed == [], "write load.seconds(LIMIT) or load.run(COMMAND, LIMIT)"
