"""Every rank cuts a collective into the same chunks: at blocks of the i32 wire, each within a slot."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from netfold.torch.calls import Prepared  # noqa: E402
from netfold.torch.device.chunks import chunk_elements, count_chunks, split_into_chunks  # noqa: E402
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
def test_chunks_cover_every_element_once_and_fit_a_slot(made: Prepared) -> None:
    elements = chunk_elements(made, 3, SLOT_BYTES)
    assert elements % 128 == 0 and elements > 0
    pieces = list(split_into_chunks(made, 1, elements, count_chunks(made, elements)))
    for piece in pieces:
        staged = [*piece.inputs, *piece.outputs]
        assert sum(-(-len(each) // ALIGN_BYTES) * ALIGN_BYTES for each in staged) <= SLOT_BYTES
    for place, tensor in enumerate(made.outputs):
        whole = torch.cat([piece.outputs[place] for piece in pieces]).view(torch.float32)
        assert torch.equal(whole, tensor)
    for place, tensor in enumerate(made.inputs):
        assert torch.equal(torch.cat([piece.inputs[place] for piece in pieces]).view(torch.float32), tensor)


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
    def ways(made: Prepared, rank: int) -> tuple[int, int]:
        (piece,) = split_into_chunks(made, rank, 1024, 1)
        return len(piece.out), len(piece.back)

    assert ways(call("all_reduce", [], [10]), 0) == (1, 1)
    assert ways(call("all_reduce", [10], [10]), 0) == (2, 2)
    assert ways(call("broadcast", [], [10], root=1), 1) == (1, 0)
    assert ways(call("broadcast", [], [10], root=1), 0) == (0, 1)
    assert ways(call("reduce", [], [10], root=1), 1) == (1, 1)
    assert ways(call("reduce", [], [10], root=1), 0) == (1, 0)
    assert ways(call("all_gather", [10], [10, 10]), 0) == (1, 2)
