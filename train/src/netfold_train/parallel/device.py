"""The device of a rank, with its weights, batches and losses. Votes and counts of the training loop stay on the CPU."""

from __future__ import annotations

import os

import torch

from netfold_train.recipe import Device

CPU = torch.device("cpu")


def choose_device(recipe: Device) -> tuple[torch.device, str]:
    """Return this rank's device and the reason, and make it torch's current one. The reason is empty without a choice.

    A rank takes the GPU of its number on its host (LOCAL_RANK). More ranks than GPUs share them in turn.
    Raises ValueError if the recipe asks for a GPU and torch finds none.
    """
    if recipe.kind == "cpu":
        return CPU, ""
    if not torch.cuda.is_available():
        if recipe.kind == "cuda":
            raise ValueError(
                "device.kind is 'cuda', but torch finds no GPU on this host: install a torch with CUDA and a driver "
                "(python -m torch.utils.collect_env shows both), or set device.kind to 'auto'"
            )
        # A torch that was built for CPUs has nothing to choose.
        return CPU, "device: cpu (this torch has CUDA, but finds no GPU)" if torch.version.cuda else ""
    count, local = torch.cuda.device_count(), int(os.environ.get("LOCAL_RANK", "0"))
    device = torch.device("cuda", local % count)
    torch.cuda.set_device(device)
    reason = f"GPU {device.index + 1} of {count} for local rank {local}"
    return device, f"device: {device}, {torch.cuda.get_device_name(device)} ({reason})"


def seed(device: torch.device, number: int) -> None:
    """Seed the generators of the CPU and of `device` alone: torch.manual_seed takes sixty times as long."""
    torch.default_generator.manual_seed(number)
    if device.type == "cuda":
        torch.cuda.default_generators[device.index].manual_seed(number)


def synchronize(device: torch.device) -> None:
    """Wait until the device has done all its work: a clock read before would measure only the submission."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
