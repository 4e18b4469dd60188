"""A rank of the job under test: torch's DistributedDataParallel over netfold, each sum checked in every element.

Every element of a step's tensors is another whole number on another rank, small enough that f32 adds them exactly. A
line per step goes to a file, and one for an error:

    step NUMBER BEGAN ENDED WRONG         seconds of CLOCK_MONOTONIC; how many elements were wrong
    error SAID KIND TEXT                  a JSON string each
    end
"""

from __future__ import annotations

import datetime
import json
import logging
import os
import sys
import time
from pathlib import Path

ELEMENTS = 40_000
PARAMETERS = 3
# Longer than all that a schedule can add up to: an operation that meets it hangs.
TIMEOUT_S = 150
STEPS_MODULUS = 64


def run_rank(folder: str, record: str) -> None:
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(message)s")
    descriptor = os.open(record, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def say(*words: object) -> None:
        os.write(descriptor, (" ".join(map(str, words)) + "\n").encode())

    try:
        _train(Path(folder), say)
    except Exception as error:
        say("error", time.monotonic(), json.dumps(type(error).__name__), json.dumps(str(error)[:2000]))
        logging.exception("the rank ends")
        # What is left of the group may wait for ranks that are gone.
        os._exit(3)
    say("end")


def _train(folder: Path, say) -> None:  # type: ignore[no-untyped-def]
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    torch.set_num_threads(1)
    dist.init_process_group("netfold", timeout=datetime.timedelta(seconds=TIMEOUT_S))
    rank, size = dist.get_rank(), dist.get_world_size()
    index = torch.arange(ELEMENTS, dtype=torch.float32)
    of_ranks = size * (size + 1) // 2

    class Model(torch.nn.Module):
        """Its gradient is its input, so what it must be is known."""

        def __init__(self) -> None:
            super().__init__()
            self.weights = torch.nn.ParameterList(torch.zeros(ELEMENTS) for _ in range(PARAMETERS))

        def forward(self, inputs: list[torch.Tensor]) -> torch.Tensor:
            return sum((weight * each).sum() for weight, each in zip(self.weights, inputs, strict=True))  # type: ignore[return-value]

    model = DistributedDataParallel(Model(), bucket_cap_mb=0.2)
    step, is_last = 0, False
    while not is_last:
        began = time.monotonic()
        shift = step % STEPS_MODULUS
        wrong = 0

        tensor = index * (rank + 1) + shift
        dist.all_reduce(tensor)
        wrong += int((tensor != index * of_ranks + shift * size).sum())

        model.zero_grad()
        # A multiple of `size`, so that the mean is a whole number.
        model([size * (index * (rank + 1) + shift + number) for number in range(PARAMETERS)]).backward()
        for number, weight in enumerate(model.module.weights):
            assert weight.grad is not None
            wrong += int((weight.grad != index * of_ranks + (shift + number) * size).sum())

        words = torch.tensor([rank == 0 and (folder / "stop").exists(), step, rank + 1], dtype=torch.int64)
        dist.all_reduce(words)
        wrong += int(words[1] != step * size) + int(words[2] != of_ranks)

        gathered = torch.empty(size * 512)
        dist.all_gather_into_tensor(gathered, index[:512] + rank * 512 + shift)
        wrong += int((gathered != torch.arange(size * 512) + shift).sum())

        is_last = bool(words[0])
        say("step", step, began, time.monotonic(), wrong)
        step += 1
    dist.destroy_process_group()
