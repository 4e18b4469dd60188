"""A model of equal layers and a cluster of round numbers, so that a step can be computed by hand."""

from dataclasses import dataclass

from netfold_plan.cluster import Cluster, Device, Tier
from netfold_plan.model import Collective, Layer, Matmul, Pass, ShardSpec


@dataclass(frozen=True)
class EvenModel:
    """Layers of which each moves so many bytes, and does so little else that every pass takes as long as its bytes.

    weights: half of a backward pass computes gradients of weights; else none of it.
    """

    name: str = "even"
    depth: int = 16
    moved_bytes: float = 1e9
    input_bytes: float = 0.0
    layer_parameters: float = 1e6
    weights: bool = False

    @property
    def parameters(self) -> float:
        return self.depth * self.layer_parameters

    @property
    def flops(self) -> float:
        return 1e12

    def layers(self, share: ShardSpec) -> tuple[Layer, ...]:
        shared = () if share.tensor == 1 else (Collective("all_reduce", 1e6),) * 2
        forward = Pass((), self.moved_bytes, 1, shared)
        # Very little arithmetic, all of it products with weights; so half of a backward pass is gradients of weights.
        matmuls = (Matmul(1, 1, 1),) if self.weights else ()
        backward = Pass(matmuls, 2 * self.moved_bytes, 1, shared)
        return (Layer("even", forward, backward, Pass(), self.layer_parameters, 1e6, self.input_bytes, self.depth),)


def cluster(*, node: int = 8, devices: int = 16384, oversubscription: float = 1.0, latency_s: float = 0.0) -> Cluster:
    device = Device("round", {"bf16": 1e14, "f32": 1e13}, 80e9, 1e12)
    tiers = (Tier("node", node, latency_s, 100e9), Tier("fabric", devices, latency_s, 10e9, oversubscription))
    return Cluster("round", device, tiers)
