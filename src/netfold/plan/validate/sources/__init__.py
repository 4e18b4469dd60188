"""Every published source that predictions are held against. A new one is a file and a line here."""

from netfold.plan.validate.sources import edsr, foundry, megatron, nccl, single_node
from netfold.plan.validate.sources.table import DATA, Case, Source

_NONE = "none of its rows"
# A rule and no number, but chosen with these rows in sight.
_ONE_RING = "no number; that ZeRO-3 gathers by one ring was decided on these and the other source's rows"
_NO_PREFETCH = f"{_ONE_RING}; that nothing hid it in early 2021 on these, with what its makers said since"
_MEGATRON = "cli99/llm-analysis figures/megatron-lm-2nd-table-2.png"

SOURCES = (
    Source(
        "GPT on one node, 2-8 A100",
        "none",
        "dgx-a100",
        "all compute constants; here without the width and tensor degree asked for",
        single_node.crossed,
    ),
    Source("Megatron-LM, tensor and pipeline, 384-2240 A100", _MEGATRON, "dgx-a100", _NONE, megatron.pipelined),
    Source("Megatron-LM's table, ZeRO-3, 384-2240 A100", _MEGATRON, "dgx-a100", _NO_PREFETCH, megatron.zero),
    Source("Korthikanti, table 5, 8-512 A100", "calculon-ai/calculon", "dgx-a100", _NONE, megatron.recomputing),
    Source("Megatron-LM's figures, 1-1024 A100 and V100", "NVIDIA/Megatron-LM", "dgx-a100", _NONE, megatron.scaling),
    Source("Megatron-Turing, 2240-3360 A100", "cli99/llm-analysis examples", "dgx-a100", _NONE, megatron.turing),
    Source("llm-foundry, FSDP, 8-128 A100", "mosaicml/llm-foundry", "a100-roce", _ONE_RING, foundry.tokens),
    Source("Korthikanti, figure 1, memory", "calculon validation.py", "dgx-a100", _NONE, megatron.memory),
    Source(
        "vTrain's nccl-tests, 2-8 A100 and V100",
        "VIA-Research/vTrain",
        "dgx-a100",
        "collective_s, copy_bytes_per_s and latencies inside nodes",
        nccl.bus_bandwidth,
    ),
    Source(
        "EDSR, 32-512 V100, from 1-16",
        "seeds/004",
        "edsr-v100",
        "two numbers a library, of its first five rows",
        edsr.throughputs,
    ),
)

__all__ = ["DATA", "SOURCES", "Case", "Source"]
