"""Settings for the tests of all packages."""

import os
import signal
import sys

# Set before anything imports torch, for all processes that tests start: workers and ranks share a few cores, and
# waiting OpenMP threads would take them all.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# A shell that starts the tests in the background has them ignore Ctrl-C, and with them every process that they start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# The longest files run first: `make test` hands files to its workers in this order, so that no long one runs alone at
# the end. A file stays with one worker, since its tests may share a world of processes.
LONGEST = (
    "sim/test_simulated_network.py",
    "train/test_products.py",
    "train/test_resume.py",
    "model_check/test_mutants.py",
    "communicator/test_failures.py",
    "profile/test_profile_page.py",
    "communicator/test_hierarchical_switch.py",
    "communicator/test_hierarchical.py",
    "switch/test_lost_switch.py",
    "torch/test_features.py",
    "train/test_pipeline.py",
    "switch/test_tree.py",
    "bench/test_figures.py",
    "train/test_each_module_alone.py",
    "communicator/test_late.py",
    "train/test_explain_is_what_runs.py",
    "torch/test_torchrun.py",
    "fuzz/test_fuzz.py",
    "communicator/test_single_copy.py",
    "train/test_data_parallel.py",
    "switch/test_failures_in_network.py",
    "train/test_explain_plan.py",
    "communicator/test_fabric.py",
    "switch/test_trust.py",
    "train/test_fault_tolerance.py",
    "communicator/test_messages_in_memory.py",
    "communicator/test_in_network_on_fabric.py",
    "communicator/test_algorithms.py",
    "diagnostics/test_top.py",
    "profile/test_recording.py",
)


def pytest_collection_modifyitems(items):
    order = {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: order.get(f"{item.path.parent.name}/{item.path.name}", len(order)))


def pytest_runtest_teardown(item, nextitem):
    # Each provider that a test names keeps its endpoint, about 300 MB, until the process ends, and every rank
    # that is forked later copies its tables.
    fabric = sys.modules.get("netfold.bootstrap.fabric")
    if fabric is not None:
        fabric.release_ports()


def pytest_terminal_summary(terminalreporter):
    """The rule that each mutant of the protocol's machines breaks, and the shortest trace: shown by green runs, too."""
    caught = [report for report in terminalreporter.stats.get("passed", []) if "without_a_check" in report.nodeid]
    if caught:
        terminalreporter.section("mutants of the protocol's machines, and the shortest trace that catches each")
        for report in caught:
            terminalreporter.write(report.capstdout)
