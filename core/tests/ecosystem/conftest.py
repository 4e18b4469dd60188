"""The table that `make test-ecosystem` ends with: framework, version, result, the line that names netfold."""

from __future__ import annotations

from typing import Any

import pytest

ROWS = pytest.StashKey[dict[str, tuple[str, str, str, str]]]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
    report = yield
    row = dict(item.user_properties)
    if "framework" in row and (report.when == "call" or report.outcome != "passed"):
        result = report.outcome
        if report.skipped and isinstance(report.longrepr, tuple):
            result = report.longrepr[2].removeprefix("Skipped: ")
        rows = item.config.stash.setdefault(ROWS, {})
        rows[item.name] = (row["framework"], row["version"], result, row["line"])
    return report


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    rows = list(config.stash.get(ROWS, {}).values())
    if not rows:
        return
    terminalreporter.section("frameworks over netfold")
    table = [("framework", "version", "result", "line"), *rows]
    widths = [max(len(row[column]) for row in table) for column in range(3)]
    for row in table:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=False)]
        terminalreporter.write_line("  ".join([*cells, row[3]]))
