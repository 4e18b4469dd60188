"""The speed at which one accelerator trains each model: published numbers, each with its source.

A model without a published number runs at the FLOP/s of a similar model: its speed is `derived`, and tables say so.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Speed:
    """samples_per_s: of one accelerator in training, including the update. batch: samples of one rank's step."""

    samples_per_s: float
    batch: int
    source: str
    derived: bool = False


# tensorflow.org/performance/benchmarks, "Details for NVIDIA DGX-1", training with synthetic data, 1 GPU.
_TENSORFLOW = "tensorflow.org/performance/benchmarks, May 2017: one P100, f32, synthetic data"
# github.com/NVIDIA/DeepLearningExamples, the READMEs' tables of training performance, 1 GPU.
_NVIDIA = "NVIDIA DeepLearningExamples, PyTorch"

PUBLISHED = {
    "alexnet": Speed(2987, 512, _TENSORFLOW),
    "vgg16": Speed(154, 64, _TENSORFLOW),
    "resnet50": Speed(219, 64, _TENSORFLOW),
    "resnet152": Speed(91.8, 64, _TENSORFLOW),
    "inception3": Speed(142, 64, _TENSORFLOW),
    "bert-large": Speed(40.32, 32, f"{_NVIDIA} 19.07: one V100, f32, 128 tokens"),
    "mask-rcnn": Speed(9.29, 4, f"{_NVIDIA} 19.02: one V100, f32"),
    # Measured with a batch of 32768, which is the whole job's: each of several ranks has a part of it.
    "dlrm": Speed(494_000, 4096, f"{_NVIDIA}, April 2020: one V100, f32, measured with a batch of 32768"),
    # The slides give neither batch nor patch; both are from Lim et al. (2017).
    "edsr": Speed(11.34, 16, "a talk on EDSR with MVAPICH2-GDR and PyTorch 1.8: one V100; the batch is Lim et al.'s"),
}

# The similar model whose FLOP/s and batch a model takes.
SIBLINGS = {
    "vgg11": "vgg16",
    "vgg19": "vgg16",
    "googlenet": "inception3",
    "inception4": "inception3",
    "resnet101": "resnet152",
    "bert-base": "bert-large",
    "edsr-baseline": "edsr",
}
