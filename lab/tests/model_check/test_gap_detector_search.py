"""The search over gap detection: production holds in every order of packets, and each mutant fails."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import pytest
from changed import change_file, load

from netfold_lab.model_check.gap_detector import PACKETS, THRESHOLD, search_arrivals, sentence

pytestmark = pytest.mark.native

PROTOCOL = Path(__file__).parents[3] / "core" / "native" / "protocol"

# The text in gap_detector.cpp, its replacement, and the promise that breaks.
MUTANTS = {
    "late-packet-is-not-recorded": (
        "if (age < 64) received_ |= std::uint64_t{1} << age;",
        "",
        "the machine's state depends on the order of the packets",
    ),
    "named-one-early": (
        "if (age + ahead < kReorderThreshold ||",
        "if (age + ahead + 1 < kReorderThreshold ||",
        "a packet is named too early",
    ),
    "named-one-late": (
        "if (age + ahead < kReorderThreshold ||",
        "if (age + ahead <= kReorderThreshold ||",
        "a packet that is missing is not named",
    ),
    "jump-is-not-named": ("if (ahead > kReorderThreshold) {", "if (false) {", "a packet that is missing is not named"),
    "jump-ends-early": (
        "last = packet_number - kReorderThreshold;",
        "last = packet_number - kReorderThreshold - 1;",
        "a packet that is missing is not named",
    ),
    "received-packets-stay": ("received_ << ahead", "received_", "a packet that is missing is not named"),
    "received-packet-is-named": (" || (received_ >> age & 1) != 0", "", "a gap names packets that were never sent"),
}


def test_every_missing_packet_is_named_once_and_in_time_in_every_order() -> None:
    report = search_arrivals()
    print(sentence(report))
    assert report.broken == ""
    # Each set of packets is one state of the machine, whatever the order.
    assert report.machines == 2**PACKETS
    assert PACKETS > THRESHOLD + 2, "there are orders in which several packets are named, together and one by one"


@pytest.mark.parametrize("name", MUTANTS)
def test_gap_detection_without_a_part_is_caught(name: str, tmp_path: Path) -> None:
    text, instead, breaks = MUTANTS[name]
    report = search_arrivals(new=_mutant(text, instead, tmp_path))
    assert report.broken == breaks
    assert report.trace
    print(f"{name}: {sentence(report)}")


def _mutant(text: str, instead: str, folder: Path) -> Any:
    """Return a class like protocol.GapDetector, compiled from the changed source."""
    source = change_file(PROTOCOL / "gap_detector.cpp", text, instead, folder)
    sources = [source, Path(__file__).with_name("gap_detector_abi.cpp")]
    library = load(folder / "gap_detector.so", sources, [PROTOCOL / "include"], "-O1")
    library.gap_detector_new.restype = library.gap_detector_copy.restype = ctypes.c_void_p

    class GapDetector:
        def __init__(self, copied: Any = None) -> None:
            made = library.gap_detector_new() if copied is None else library.gap_detector_copy(copied)
            self._self = ctypes.c_void_p(made)

        def __del__(self) -> None:
            library.gap_detector_delete(self._self)

        def __eq__(self, other: object) -> bool:
            return isinstance(other, GapDetector) and bool(library.gap_detector_equal(self._self, other._self))

        def copy(self) -> GapDetector:
            return GapDetector(self._self)

        def observe(self, packet_number: int) -> tuple[int, int]:
            first, count = ctypes.c_uint64(), ctypes.c_uint32()
            library.gap_detector_observe(
                self._self, ctypes.c_uint64(packet_number), ctypes.byref(first), ctypes.byref(count)
            )
            return first.value, count.value

    return GapDetector
