"""Every rank cuts a collective into the same chunks: at blocks of the i32 wire, each within a slot."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from netfold.torch.calls import Prepared  # noqa: E402
from netfold.torch.device.chunks import chunk_elements, copies_of, count_chunks  # noqa: E402
from netfold.torch.device.pinned import ALIGN_BYTES  # noqa: E402

pytestmark = pytest.mark.torch

SLOT_BYTES = 10_000


def call(kind: str, inputs: list[int], outputs: list[int], root: int = 0) -> Prepared:
    made = [[torch.arange(count, dtype=torch.float32) for count in counts] for counts in (inputs, outputs)]
    return Prepared(kind, root=root, inputs=made[0], outputs=made[1])


@pytest.mark.parametrize(
    "made",
    [
        call("all_reduce", [], [5000]),
        call("all_reduce", [5000], [5000]),
        call("all_gather", [3000], [3000, 10, 0]),
        call("reduce_scatter", [700, 700, 700], [700]),
        call("all_to_all", [1, 2, 300], [300, 0, 5000]),
        call("broadcast", [], [0]),
    ],
)
def test_chunks_begin_at_blocks_and_fit_a_slot(made: Prepared) -> None:
    elements = chunk_elements(made, 3, SLOT_BYTES)
    assert elements % 128 == 0 and elements > 0
    tensors = [*made.inputs, *made.outputs]
    assert count_chunks(made, elements) * elements >= max(map(len, tensors))
    parts = [-(-4 * min(elements, len(each)) // ALIGN_BYTES) * ALIGN_BYTES for each in tensors]
    assert sum(parts) <= SLOT_BYTES


def test_a_root_and_the_other_ranks_split_alike() -> None:
    for kind, at_root, elsewhere in (
        ("gather", ([900], [900] * 3), ([900], [])),
        ("scatter", ([900] * 3, [900]), ([], [900])),
    ):
        root, other = call(kind, *at_root), call(kind, *elsewhere)
        elements = chunk_elements(root, 3, SLOT_BYTES)
        assert elements == chunk_elements(other, 3, SLOT_BYTES)
        assert count_chunks(root, elements) == count_chunks(other, elements)


def test_only_needed_bytes_are_copied() -> None:
    def ways(kind: str, rank: int) -> tuple[tuple[bool, bool], tuple[bool, bool]]:
        return copies_of(Prepared(kind, root=1), rank)

    assert ways("all_reduce", 0) == ((True, True), (True, True))
    assert ways("broadcast", 1) == ((False, False), (True, False))
    assert ways("broadcast", 0) == ((False, False), (False, True))
    assert ways("reduce", 1) == ((False, False), (True, True))
    assert ways("reduce", 0) == ((False, False), (True, False))
    assert ways("all_gather", 0) == ((True, False), (False, True))
