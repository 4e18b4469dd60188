"""At the end of a run: what each mutant breaks, and the shortest trace to it."""


def pytest_terminal_summary(terminalreporter):
    caught = [report for report in terminalreporter.stats.get("passed", []) if "without_its_check" in report.nodeid]
    if caught:
        terminalreporter.section("mutants of the protocol's machines, and the shortest trace that catches each")
        for report in caught:
            terminalreporter.write(report.capstdout)
