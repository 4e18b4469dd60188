"""Its place puts this folder on the path, so that tests of every room can say `from ranks import run_ranks`."""


def pytest_terminal_summary(terminalreporter):
    """What each mutant of the protocol's machines breaks, and the shortest trace: shown by green runs, too."""
    caught = [report for report in terminalreporter.stats.get("passed", []) if "without_its_check" in report.nodeid]
    if caught:
        terminalreporter.section("mutants of the protocol's machines, and the shortest trace that catches each")
        for report in caught:
            terminalreporter.write(report.capstdout)
