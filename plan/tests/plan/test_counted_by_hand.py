"""The bytes, memory and waiting time of a step against values counted by hand: few ranks, round numbers."""

from dataclasses import replace
from typing import Any

import pytest
from even_model import EvenModel, cluster
from validation import sources

from netfold_plan.cluster import Cluster
from netfold_plan.cluster.networks import with_network
from netfold_plan.events import IDEAL, Conditions, simulate, timeline
from netfold_plan.job import Job, Split
from netfold_plan.model import Chain, ChainLayer, Layered, Product, Transformer
from netfold_plan.step import FITTED, Prediction, predict
from netfold_plan.step.memory import memory_of
from netfold_plan.step.traffic import Group, collective_s

# Collectives that cost their bytes on the links and nothing else.
BYTES_ALONE = replace(FITTED, collective_s=0.0, copy_bytes_per_s=float("inf"))


def test_all_to_all_between_nodes_uses_each_ranks_own_adapter() -> None:
    # Four ranks on two nodes give n bytes each, a quarter to every rank: n/2 leave a rank for the other node, over its
    # adapter of 10 GB/s, however many adapters are beside it.
    n, nodes = 4e9, cluster(node=2)
    assert collective_s("all_to_all", n, Group(4), nodes, BYTES_ALONE) == pytest.approx(n / 2 / 10e9)
    # 16 ranks on two nodes of 8: 8/16 of n leave a rank.
    assert collective_s("all_to_all", n, Group(16), cluster(node=8), BYTES_ALONE) == pytest.approx(n / 2 / 10e9)
    # In one node: 3/4 of n over 100 GB/s.
    assert collective_s("all_to_all", n, Group(4), cluster(node=4), BYTES_ALONE) == pytest.approx(3 / 4 * n / 100e9)
    # One rank of each node, eight apart: as if nodes had one rank.
    assert collective_s("all_to_all", n, Group(4, 8), cluster(node=8), BYTES_ALONE) == pytest.approx(3 / 4 * n / 10e9)


def test_all_to_all_through_three_tiers_takes_the_time_of_the_busiest_tier() -> None:
    # Eight ranks: two a node, two nodes a rack, two racks. 6/8 of n leave a rank's node, 4/8 its rack, where half of
    # the links are missing: 4/8 at 5 GB/s is more than 6/8 at 10.
    inner = cluster(node=2)
    racks = (inner.tiers[0], replace(inner.tiers[1], devices=4), replace(inner.tiers[1], oversubscription=2.0))
    n = 8e9
    found = collective_s("all_to_all", n, Group(8), replace(inner, tiers=racks), BYTES_ALONE)
    assert found == pytest.approx(max(6 / 8 * n / 10e9, 4 / 8 * n / 5e9))


def test_all_to_all_pays_the_latency_of_its_partners_tiers() -> None:
    # Of three partners one is in the node and two are beyond it; two exchanges are under way at a time.
    near, far = 1e-6, 10e-6
    there = cluster(node=2)
    tiers = (replace(there.tiers[0], latency_s=near), replace(there.tiers[1], latency_s=far))
    found = collective_s("all_to_all", 1e-9, Group(4), replace(there, tiers=tiers), BYTES_ALONE)
    assert found == pytest.approx(2 * (near + 2 * far) / 3)


# 16 layers of 100 million parameters: 6.4 GB of gradients, 3.2 GB of weights. Over four ranks of a node at 100 GB/s a
# reduce-scatter of the former takes 3/4 of 64 ms, an all-gather of the latter 3/4 of 32 ms.
STATE = EvenModel(layer_parameters=1e8)
REDUCED_S, GATHERED_S = 0.048, 0.024


def zero_job(level: int, *, overlap: bool = False, bucket_bytes: float = 25 * 2**20) -> Job:
    """Four microbatches on each of four ranks."""
    return Job(16, 1, Split(data=4, zero=level), overlap=overlap, bucket_bytes=bucket_bytes)


def data_s(job: Job) -> float:
    return predict(STATE, cluster(), job, BYTES_ALONE).exposed_s["data"]


def test_zero_2_reduces_gradients_after_every_microbatch_and_zero_1_once() -> None:
    # Gradients of which a rank keeps a quarter cannot be summed over microbatches before they are reduced.
    assert data_s(zero_job(0)) == pytest.approx(2 * REDUCED_S)
    assert data_s(zero_job(1)) == pytest.approx(REDUCED_S + GATHERED_S)
    assert data_s(zero_job(2)) == pytest.approx(4 * REDUCED_S + GATHERED_S)


def test_zero_2_hides_reductions_behind_the_backward_pass_of_their_microbatch() -> None:
    for moved_bytes, left_s in ((0.5e9, REDUCED_S - 0.0237), (2e9, REDUCED_S / 10)):
        # A backward pass of 24 ms hides as much; one of 95 ms all but the last of ten buckets.
        model = replace(STATE, moved_bytes=moved_bytes)
        said = predict(model, cluster(), zero_job(2, overlap=True, bucket_bytes=6.4e8), BYTES_ALONE)
        assert said.stages[0].backward_s == pytest.approx(2 * 16 * moved_bytes / (0.678 * 1e12), rel=0.03)
        assert said.exposed_s["data"] == pytest.approx(4 * left_s + GATHERED_S, rel=0.01)


def test_weight_gathers_of_zero_1_and_2_are_not_hidden() -> None:
    # The gather starts after the update, when no backward pass can hide it.
    for level, reductions in ((1, 1), (2, 4)):
        quiet = replace(STATE, moved_bytes=1e11)
        job = zero_job(level, overlap=True, bucket_bytes=6.4e6)
        said = predict(quiet, cluster(), job, BYTES_ALONE)
        assert said.exposed_s["data"] == pytest.approx(reductions * REDUCED_S / 1000 + GATHERED_S)


@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize("overlap", [False, True])
def test_a_simulated_step_of_zero_1_and_2_takes_the_closed_forms_time(level: int, overlap: bool) -> None:
    job = zero_job(level, overlap=overlap, bucket_bytes=6.4e8)
    longer = replace(STATE, moved_bytes=2e9)
    closed = predict(longer, cluster(), job, BYTES_ALONE)
    for folded in (True, False):
        said = simulate(longer, cluster(), job, IDEAL, BYTES_ALONE, folded=folded)
        assert said.prediction.step_s == pytest.approx(closed.step_s, rel=0.01)
        assert said.prediction.exposed_s["data"] == pytest.approx(closed.exposed_s["data"], rel=0.05)
        (gathered,) = [each for each in timeline(said, [3]) if each.name == "all_gather"]
        # The update is over, and nothing follows.
        assert gathered.end_s - gathered.start_s == pytest.approx(GATHERED_S)
        assert gathered.end_s == pytest.approx(said.prediction.step_s) and gathered.size_bytes == 3.2e9


def test_recomputing_blocks_holds_one_blocks_activations_and_every_blocks_input() -> None:
    """Korthikanti et al. 2022, table 2: a block has sbh (34 + 5as/h) bytes of activations, of which 2sbh are its input.

    Kept of each of 4 blocks: its input. While the last of them is recomputed for its backward pass, all that it has.
    """
    s, b, h, a = 1024, 2, 1024, 16
    model = Transformer("small", h, a, 4, s, vocabulary=128)
    sbh = s * b * h
    # The embedding's mask, a byte an element. The head's two activations and logits are gone when blocks come.
    kept = sbh + 4 * 2 * sbh
    one_block = sbh * (34 + 5 * a * s / h) - 2 * sbh
    full = predict(model, cluster(), Job(b, b, recomputation="full"))
    assert full.memory.activations == pytest.approx(kept + one_block)
    # Selective recomputation makes the scores again, of one block: 5 as^2 b.
    selective = predict(model, cluster(), Job(b, b, recomputation="selective"))
    assert selective.memory.activations == pytest.approx(sbh + 4 * 34 * sbh + 5 * a * s * s * b)
    # Two stages: the first keeps two microbatches of two blocks, and recomputes one block of one of them.
    stages = predict(model, cluster(), Job(4 * b, b, Split(pipeline=2), recomputation="full"))
    first = memory_of(stages.stages[0], 0, 4, Job(4 * b, b, Split(pipeline=2), recomputation="full"))
    assert first.activations == pytest.approx(2 * (sbh + 2 * 2 * sbh) + one_block)


def test_a_recomputed_block_never_needs_less_memory_than_the_head_after_it() -> None:
    # A vocabulary so large that logits, in 2 and 4 bytes, are more than a block.
    s, h = 1024, 1024
    model = Transformer("wordy", h, 16, 2, s, vocabulary=128 * 2048)
    found = predict(model, cluster(), Job(1, 1, recomputation="full")).memory.activations
    assert found == pytest.approx(s * h * (1 + 2 * 2 + 2 * 2) + 4 * s * 128 * 2048)


def test_a_recomputed_chain_holds_all_activations_of_one_link() -> None:
    # Three links of 1,000, 5,000 and 2,000 numbers; each keeps its input, of 0, 100 and 200 numbers; 2 bytes each.
    links = tuple(
        ChainLayer(str(kept), (Product(64, 64, 64),), 4096, changed=0.0, kept=kept, handed=handed)
        for kept, handed in ((1000.0, 100.0), (5000.0, 200.0), (2000.0, 300.0))
    )
    found = predict(Chain("three", links), cluster(), Job(1, 1, recomputation="full")).memory.activations
    # In the second link's backward pass: the first's and the second's input, and what else the second makes again.
    assert found == pytest.approx(2 * (0 + 100 + (5000 - 100)))


def test_recomputing_a_catalogue_layer_keeps_its_input() -> None:
    # Layer by layer what comes in is what the layer before kept: nothing is saved, and the arithmetic is done again.
    none, full = (predict(Layered("resnet50"), cluster(), Job(32, 32, recomputation=word)) for word in ("none", "full"))
    assert full.compute_s > none.compute_s
    assert full.memory.activations >= 0.9 * none.memory.activations


def test_memory_of_zero_3_counts_a_gathered_layer_beside_recomputed_activations() -> None:
    # Four ranks, blocks of 12h^2 + 13h weights in 2 bytes and gradients in 4.
    s, h, a = 1024, 1024, 16
    model = Transformer("small", h, a, 4, s, vocabulary=128)
    sbh, block = s * h, 12 * h * h + 13 * h
    kept, recomputed = sbh + 4 * 2 * sbh, sbh * (34 + 5 * a * s / h) - 2 * sbh
    ahead = Job(4, 1, Split(data=4, zero=3), recomputation="full")
    found = predict(model, cluster(), ahead).memory.activations
    assert found == pytest.approx(kept + recomputed + 2 * 2 * block + 4 * block)
    # Without prefetch the next layer's weights are absent, and gradients appear only as activations are freed.
    found = predict(model, cluster(), replace(ahead, prefetch=False)).memory.activations
    assert found == pytest.approx(kept + max(recomputed, 4 * block) + 2 * block)


def test_every_published_run_fits_its_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []

    def noted(*asked: Any) -> Prediction:
        found.append((asked[0].name, asked[2], predict(*asked)))
        return found[-1][2]

    monkeypatch.setattr(sources, "predict", noted)
    for source in sources.SOURCES:
        if source.name.startswith(("Megatron", "Korthikanti, table 5", "llm-foundry")):
            source.compare()
    assert len(found) > 150
    assert not [(name, job) for name, job, prediction in found if not prediction.fits]


# Messages that cost their bytes on the link between two stages and nothing else.
MESSAGES_ALONE = replace(BYTES_ALONE, send_bytes_per_s=float("inf"))
ACTIVATIONS = EvenModel(input_bytes=1e9, moved_bytes=1e12)
NEAR_S, FAR_S = 1e9 / 100e9, 1e9 / 10e9


@pytest.mark.parametrize(
    ("split", "node", "near", "far"),
    [
        # Two stages per node: only the second one's messages leave it.
        ({"pipeline": 4}, 2, 2, 1),
        ({"pipeline": 4}, 4, 3, 0),
        ({"pipeline": 8}, 4, 6, 1),
        # Stages of two ranks: both of a node's four ranks' stages, then the next node's.
        ({"pipeline": 4, "data": 2}, 4, 2, 1),
        # A stage is a node.
        ({"pipeline": 4, "data": 2}, 2, 0, 3),
        # Ranks 0 and 1 send to 2 and 3, of which a node of three has only the first: the pair apart is waited for.
        ({"pipeline": 2, "data": 2}, 3, 0, 1),
        # Interleaved, once more round from the last stage to the first.
        ({"pipeline": 4, "interleave": 2}, 2, 4, 3),
        ({"pipeline": 4, "interleave": 2}, 4, 7, 0),
        ({"pipeline": 2, "interleave": 4, "data": 2}, 2, 0, 7),
    ],
)
def test_messages_between_two_stages_use_the_link_between_them(
    split: dict[str, Any], node: int, near: int, far: int
) -> None:
    schedule = "interleaved" if "interleave" in split else "gpipe"
    job = Job(32, 1, Split(**split), schedule=schedule)
    closed = predict(ACTIVATIONS, cluster(node=node), job, MESSAGES_ALONE)
    # Once forwards and once backwards, while the pipeline fills and drains.
    assert closed.exposed_s["pipeline"] == pytest.approx(2 * (near * NEAR_S + far * FAR_S))
    for folded in (True, False):
        said = simulate(ACTIVATIONS, cluster(node=node), job, IDEAL, MESSAGES_ALONE, folded=folded)
        assert said.prediction.step_s == pytest.approx(closed.step_s)


@pytest.mark.parametrize("microbatches", [8, 16, 64])
@pytest.mark.parametrize("node", [2, 4])
def test_one_forward_one_backward_over_two_kinds_of_links_takes_the_simulated_time(
    microbatches: int, node: int
) -> None:
    # The larger messages take longer between nodes than a stage computes for a microbatch.
    job = Job(microbatches, 1, Split(pipeline=8))
    for size in (1e7, 1e8):
        model = EvenModel(input_bytes=size)
        closed = predict(model, cluster(node=node), job, MESSAGES_ALONE)
        said = simulate(model, cluster(node=node), job, IDEAL, MESSAGES_ALONE).prediction
        assert closed.step_s == pytest.approx(said.step_s, rel=0.02 if microbatches == 64 else 0.07), size


def loaded(under_load: float) -> Cluster:
    """Nodes of two ranks on a fabric whose adapters keep up so much of 10 GB/s while all of them send."""
    there = cluster(node=2)
    return replace(there, tiers=(there.tiers[0], replace(there.tiers[1], under_load=under_load)))


def test_a_tier_under_load_has_its_measured_share_of_the_rate() -> None:
    # All_reduce of n over two nodes of two: 3/2 of n through two adapters of a node. All_to_all: n/2 through one.
    n = 4e9
    for part in (1.0, 0.8, 0.5):
        ring = collective_s("reduce_scatter", n, Group(4), loaded(part), BYTES_ALONE)
        assert ring == pytest.approx(3 / 4 * n / (2 * part * 10e9))
        assert collective_s("all_to_all", n, Group(4), loaded(part), BYTES_ALONE) == pytest.approx(n / 2 / part / 10e9)
        job = Job(8, 1, Split(pipeline=2, data=2), schedule="gpipe")
        closed = predict(ACTIVATIONS, loaded(part), job, MESSAGES_ALONE)
        assert closed.exposed_s["pipeline"] == pytest.approx(2 * FAR_S / part)


@pytest.mark.parametrize(
    ("split", "times"),
    [
        # Nodes of four devices have four adapters, and above them one link's worth for all four.
        ({"data": 1}, 1),
        ({"data": 2}, 2),
        ({"data": 4}, 4),
        ({"data": 2, "tensor": 2}, 4),
        # Eight ranks are two nodes, each with its own links above.
        ({"data": 8}, 4),
    ],
)
def test_messages_of_a_stage_share_the_links_above_its_node(split: dict[str, Any], times: int) -> None:
    # Stages of one or two ranks: the last of four or two stages in a node sends beyond it.
    ranks = split["data"] * split.get("tensor", 1)
    stages = max(2, 8 // ranks)
    job = Job(8 * split["data"], 1, Split(pipeline=stages, **split), schedule="gpipe", scattered=False)
    above = cluster(node=4, oversubscription=4.0)
    closed = predict(ACTIVATIONS, above, job, MESSAGES_ALONE)
    near = stages - 2 if ranks < 4 else 0
    assert closed.exposed_s["pipeline"] == pytest.approx(2 * (near * NEAR_S + (stages - 1 - near) * times * FAR_S))
    # Played on links that are shared, it is the same, but for gradients that meet the last messages.
    for folded in (True, False):
        said = simulate(ACTIVATIONS, above, job, Conditions(), MESSAGES_ALONE, folded=folded)
        assert said.prediction.step_s == pytest.approx(closed.step_s, rel=1e-4), folded


def test_a_replaced_network_does_not_inherit_the_measured_share_under_load() -> None:
    assert with_network(loaded(0.5), "infiniband-hdr").tiers[1].under_load == 1.0
    # The same links, with another protocol or with more above them.
    for name in ("tcp", "full-bisection"):
        assert with_network(loaded(0.5), name).tiers[1].under_load == 0.5
