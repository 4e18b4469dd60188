"""Whether autograd's engine calls, and not a user's script: DDP's reducer calls from there."""

from __future__ import annotations

import sys

from torch.autograd import graph

_backward = graph._engine_run_backward.__code__


def is_autograds(depth: int) -> bool:
    """Whether the frame `depth` above the caller's is the engine's.

    The engine runs a backward of CPU tensors on the thread of `backward`, under that function's frame. For a GPU it has
    a thread of its own, where no frame of Python is above what it calls.
    """
    frame = sys._getframe(1)
    for _ in range(depth):
        if frame.f_back is None:
            return True
        frame = frame.f_back
    return frame.f_code is _backward
