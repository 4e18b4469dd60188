"""Build a profiled step for the event loop: layer by layer, with its buckets and the vote of all ranks.

Each rank computes as it did alone; buckets take the times of the formulas on the cluster's links. Where hosts share
cores, the host work around the layers and the work of collectives take turns on these cores.
"""

from __future__ import annotations

from netfold_plan.cluster import Cluster
from netfold_plan.events.buckets import Bucket, TaskInfo
from netfold_plan.events.build import BuiltStep, TaskDurations
from netfold_plan.events.conditions import Conditions
from netfold_plan.events.event_loop import Hosts, Step, Task
from netfold_plan.events.mesh import Mesh
from netfold_plan.events.schedule import BACKWARD, FORWARD, Turn
from netfold_plan.job import Job
from netfold_plan.model import TimedStep
from netfold_plan.step import Constants
from netfold_plan.step.traffic import Group, collective_s


def build_timed_step(
    model: TimedStep, cluster: Cluster, job: Job, conditions: Conditions, constants: Constants, *, folded: bool
) -> BuiltStep:
    """Raises ValueError, in one sentence, for a split or an order that was not profiled."""
    split = job.split
    if split.ranks != split.data or split.zero or job.microbatches > 1 or not job.overlap:
        raise ValueError(
            f"{model.name}: was profiled in data parallelism, with one microbatch per step and overlap; use data ranks "
            "only, without ZeRO, a microbatch of all samples, and overlap"
        )
    mesh = Mesh(cluster, split, folded=folded, contention=conditions.contention)
    info, host_s, releases, closing = _task_info(model)
    # No task sends to another stage: the only flags are those of buckets.
    tasks = [
        Task((closing,) if at == len(info) - 1 else (), None, task.turn.kind == FORWARD, releases.get(at, ()))
        for at, task in enumerate(info)
    ]
    sizes = [bucket.size_bytes for bucket in model.ready]
    group = Group(split.data)

    def seconds(size: float, wire: str) -> float:
        return collective_s("all_reduce", size, group, cluster, constants, job.in_network, wire=wire, alongside=1)

    took = [seconds(size, job.wire) for size in sizes] + [seconds(model.vote_bytes, "f32")]
    # A pause saves only the time of bytes.
    least = seconds(1.0, "f32")
    sent_s = [max(0.0, each - least) for each in took]
    shared, rate = cluster.shared, min(tier.bytes_per_s for tier in cluster.tiers)
    latency_s = max(tier.latency_s for tier in cluster.tiers)
    steps = round(least / latency_s) if latency_s else 0
    busy, switch = [0.0] * len(took), [0.0] * len(took)
    if shared is not None and split.data > 1:
        busy = [shared.operation_s + steps * shared.message_s + shared.byte_s * rate * each for each in sent_s]
        if job.in_network:
            switch = [split.data * shared.switch_byte_s * rate * each for each in sent_s]
    durations = TaskDurations(mesh, conditions, 0)
    step = Step(
        replicas=mesh.replicas,
        tasks=[tasks],
        seconds=durations.seconds(0, info),
        flags=len(took),
        send_s=[(0.0, 0.0)] * mesh.lanes,
        send_uses=[((), ())] * mesh.lanes,
        bucket_s=[took],
        bucket_uses=[()],
        first_buckets=[0],
        bucket_flag=0,
        update_s=[0.0] * mesh.lanes,
        gather_s=[0.0],
        capacity=mesh.capacity,
        slowed=conditions.interference,
        hosts=Hosts(
            cores=shared.cores if shared is not None else mesh.lanes,
            tasks_s=[host_s],
            buckets_s=[busy],
            switch_s=[switch],
            update_s=model.updating_host_s,
            beside_s=model.beside_host_s if shared is not None else 0.0,
            crowded=model.crowded if shared is not None else 1.0,
            burst_s=min(tier.burst_bytes / tier.bytes_per_s for tier in cluster.tiers),
            sent_s=[sent_s],
        ),
    )
    buckets = tuple(
        Bucket("all_reduce", size, each) for size, each in zip((*sizes, model.vote_bytes), took, strict=True)
    )
    return BuiltStep(step, mesh, (tuple(info),), (buckets,), 0, (None,))


def _task_info(model: TimedStep) -> tuple[list[TaskInfo], list[float], dict[int, tuple[int, ...]], int]:
    """Tasks; the core seconds before each; the buckets that each releases; and the bucket that the last task waits for.

    The last task closes the step: from the end of the last bucket to the vote of all ranks.
    """
    forward = [(layer.forward_host_s, layer.forward_s) for layer in model.timed]
    backward: list[tuple[float, float]] = []
    releases: dict[int, tuple[int, ...]] = {}

    def release(through: int) -> None:
        for number, bucket in enumerate(model.ready):
            if bucket.layers == through:
                releases[len(forward) + len(backward)] = (number,)
                backward.append((bucket.host_s, 0.0))

    release(0)
    for through, layer in enumerate(reversed(model.timed), 1):
        backward.append((layer.backward_host_s, layer.backward_s))
        release(through)
    releases[len(forward) + len(backward)] = (len(model.ready),)
    backward.append((model.closing_host_s, 0.0))
    info = []
    for kind, parts in ((FORWARD, forward), (BACKWARD, backward)):
        turn = Turn(kind, 0, 0)
        info += [TaskInfo(turn, part, len(parts), device_s, 0.0, 0.0) for part, (_, device_s) in enumerate(parts)]
    return info, [host_s for host_s, _ in forward + backward], releases, len(model.ready) - 1
