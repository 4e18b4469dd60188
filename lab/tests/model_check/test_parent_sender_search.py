"""The search over a leaf's sender: production follows its table in every order, and each mutant fails."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import pytest
from changed import change_file, load

from netfold_lab.model_check.parent_sender import QUICK, search_parent_sender, sentence

pytestmark = pytest.mark.native

PROTOCOL = Path(__file__).parents[3] / "core" / "native" / "protocol"

IN_FLIGHT = "the sums in flight differ from the table's"
OTHER = "a sum other than the next one is sent"
COUNTED = "the packet counts differ from the table's"
NAMED = "a NACK resends other sums than it names"

# The text in parent_sender.cpp, its replacement, and the promise that breaks.
MUTANTS = {
    "offered-again-is-not-sent-again": ("    make_due(slot);\n    return;", "    return;", IN_FLIGHT),
    "number-is-used-again": (
        "  --packets_sent_;\n",
        "  --packets_sent_;\n  --packet_number_;\n",
        "a packet number is used twice",
    ),
    "refused-counts-as-sent": ("  entry.sent = entry.again;\n", "", COUNTED),
    "refused-is-not-offered-again": (
        "entry.sent = entry.again;\n  make_due(slot);",
        "entry.sent = entry.again;",
        IN_FLIGHT,
    ),
    "next-sum-counts-as-a-retransmission": ("entry = Entry{};", "entry.state = State::none;", COUNTED),
    "sent-twice-shows-which-was-answered": (" && !entry.again) {", ") {", IN_FLIGHT),
    "more-go-again-than-are-missing": ("left > 0 && at != kNone", "gap.count > 0 && at != kNone", IN_FLIGHT),
    "one-goes-again-where-several-are-missing": ("left = gap.count;", "left = gap.count > 0;", IN_FLIGHT),
    "passed-over-one-late": (
        "+ kReorderThreshold > highest_received_send_",
        "+ kReorderThreshold >= highest_received_send_",
        IN_FLIGHT,
    ),
    "not-passed-over": ("+ kReorderThreshold > highest_received_send_", "> highest_received_send_", IN_FLIGHT),
    "newest-goes-again": ("std::uint32_t at = flight_.head;\n  for", "std::uint32_t at = flight_.tail;\n  for", OTHER),
    "nack-misses-its-first": ("send_number >= first", "send_number > first", NAMED),
    "nack-names-one-more": ("send_number - first >= count", "send_number - first > count", NAMED),
    "named-is-not-sent-again": ("      make_due(at);\n      ++again;", "      ++again;", IN_FLIGHT),
}


@pytest.mark.parametrize("name", QUICK)
def test_a_leaf_follows_its_table_in_every_order(name: str) -> None:
    report = search_parent_sender(QUICK[name])
    print(sentence(QUICK[name], report))
    assert report.broken == ""
    assert report.passed_over > 0, "some result resends a sum that it passed over"
    assert (report.named > 0) == (QUICK[name].nacks > 0), "some NACK resends a sum exactly where NACKs are searched"


@pytest.mark.parametrize("name", MUTANTS)
def test_a_sender_without_a_part_is_caught(name: str, tmp_path: Path) -> None:
    text, instead, breaks = MUTANTS[name]
    scope = QUICK["named" if "handle_nack" in _function_of(text) else "passed-over"]
    report = search_parent_sender(scope, new=_mutant(text, instead, tmp_path))
    print(f"{name}: {sentence(scope, report)}")
    assert report.broken == breaks
    assert report.trace


def _function_of(text: str) -> str:
    """Return the first line of the function in parent_sender.cpp that has the text."""
    before = (PROTOCOL / "parent_sender.cpp").read_text().partition(text)[0]
    return before[before.rindex("ParentSender::") :].splitlines()[0]


def _mutant(text: str, instead: str, folder: Path) -> Any:
    """Return a class like protocol.ParentSender, compiled from the changed source."""
    source = change_file(PROTOCOL / "parent_sender.cpp", text, instead, folder)
    sources = [source, PROTOCOL / "gap_detector.cpp", Path(__file__).with_name("parent_sender_abi.cpp")]
    library = load(folder / "parent_sender.so", sources, [PROTOCOL / "include"], "-O0")
    for name in ("new", "copy"):
        getattr(library, f"parent_sender_{name}").restype = ctypes.c_void_p
    for name in ("packets_sent", "sent_again", "canonical"):
        getattr(library, f"parent_sender_{name}").restype = ctypes.c_uint64

    class ParentSender:
        def __init__(self, slots: int, copied: Any = None) -> None:
            self._self = ctypes.c_void_p(
                library.parent_sender_new(slots) if copied is None else library.parent_sender_copy(copied)
            )

        def __del__(self) -> None:
            library.parent_sender_delete(self._self)

        def canonical(self) -> bytes:
            out = ctypes.create_string_buffer(1024)
            size = library.parent_sender_canonical(self._self, out, ctypes.c_uint64(len(out)))
            assert size <= len(out)
            return out.raw[:size]

        def copy(self) -> ParentSender:
            return ParentSender(0, self._self)

        def offer(self, slot: int) -> None:
            library.parent_sender_offer(self._self, slot)

        def poll_send(self) -> tuple[int, int] | None:
            slot, counter = ctypes.c_uint32(), ctypes.c_uint64()
            if not library.parent_sender_poll_send(self._self, ctypes.byref(slot), ctypes.byref(counter)):
                return None
            return slot.value, counter.value

        def not_sent(self, slot: int) -> None:
            library.parent_sender_not_sent(self._self, slot)

        def handle_result(self, slot: int, number: int) -> None:
            library.parent_sender_handle_result(self._self, slot, ctypes.c_uint64(number))

        def handle_nack(self, first: int, count: int) -> int:
            return int(library.parent_sender_handle_nack(self._self, ctypes.c_uint64(first), ctypes.c_uint64(count)))

        in_flight = property(lambda self: library.parent_sender_in_flight(self._self))
        packets_sent = property(lambda self: library.parent_sender_packets_sent(self._self))
        sent_again = property(lambda self: library.parent_sender_sent_again(self._self))

    return ParentSender
