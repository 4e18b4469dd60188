"""The demo's table of results, for the terminal and the page."""

from __future__ import annotations

from netfold_lab.demo.experiment import Experiment, Outcome
from netfold_lab.demo.settings import SCALE, Training
from netfold_train.zoo.data.resolution import PSNR_BORDER_PIXELS
from netfold_train.zoo.data.super_resolution import HELD_OUT

COLUMNS = ("", "PSNR", "images/s", "on the wire\na worker-step", "in collectives\na worker-step")


def rows(story: Experiment) -> list[tuple[str, ...]]:
    bicubic = ("bicubic", f"{story.mean_psnr('bicubic'):.2f} dB", "", "", "")
    return [bicubic, *(_row(story, outcome) for outcome in (story.netfold, story.gloo))]


def _row(story: Experiment, outcome: Outcome) -> tuple[str, ...]:
    backend = outcome.run.backend
    psnr = story.mean_psnr(backend)
    return (
        f"EDSR, {backend}",
        f"{psnr:.2f} dB ({psnr - story.mean_psnr('bicubic'):+.2f})",
        f"{outcome.images_per_s:.0f}",
        f"{outcome.wire_bytes_per_step / 2**20:.2f} MB",
        f"{outcome.collective_s_per_step * 1e3:.0f} of {outcome.step_s * 1e3:.0f} ms",
    )


def notes(training: Training) -> list[str]:
    """The meaning of each column, in order."""
    side = training.patch_pixels * SCALE
    return [
        f"PSNR: mean over {len(HELD_OUT)} photographs that no worker trained on; red, green and blue together, "
        f"8-bit values, {PSNR_BORDER_PIXELS} pixels of border left out; the same code for every row.",
        f"images/s: patches of {side} x {side} pixels trained on, over all {training.workers} workers. The backends "
        "ran one after another, so another program on this machine can slow down one of them.",
        "on the wire: sent and received by one worker in the median step, counted by the kernel at the loopback "
        "interface, headers and acknowledgements included; 1 MB = 2^20 bytes.",
        "in collectives: time with at least one all-reduce of gradients under way, mean of the workers. Most of this "
        "time overlaps with the backward pass, and much of it is waiting for workers that share the cores.",
    ]
