"""Do something before a chosen bytecode of a call: what a signal handler can do, without waiting for luck."""

from __future__ import annotations

import gc
import os
import sys
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from load import seconds

import netfold

_NETFOLD = os.path.dirname(netfold.__file__) + os.sep


def before_opcode(number: int, action: Callable[[], Any], call: Callable[[], Any]) -> bool:
    """Run `call`, and `action` before its bytecode `number` (from 1). False: `call` has fewer.

    Only netfold's frames are counted. An exception of `action` goes on in the interrupted frame.
    """
    left = number

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal left
        if not frame.f_code.co_filename.startswith(_NETFOLD):
            return None
        frame.f_trace_lines, frame.f_trace_opcodes = False, True
        if event == "opcode":
            left -= 1
            if left == 0:
                action()
        return trace

    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(None)
    return left <= 0


def interrupted_at_each_opcode(make: Callable[[], Any], call: Callable[[Any], Any]) -> Iterator[int]:
    """Run `call` with new buffers until KeyboardInterrupt came before each of its bytecodes in turn; yields after each.

    make: the buffers. Nothing refers to them after `call` but what it called.
    """

    def interrupt() -> None:
        raise KeyboardInterrupt

    number = 1
    while True:
        buffers = [make()]
        try:
            if not before_opcode(number, interrupt, lambda buffers=buffers: call(buffers.pop())):  # type: ignore[misc]
                return
        except KeyboardInterrupt:
            pass
        yield number
        number += 1


class Submissions:
    """Stands for a native group, and counts the operations that it was given."""

    def __init__(self, native: Any) -> None:
        self._native = native
        self.count = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._native, name)

    def submit(self, *args: Any) -> Any:
        operation = self._native.submit(*args)
        self.count += 1
        return operation


def are_dropped(references: list[Any], drop: Callable[[], Any]) -> bool:
    """Whether all referents die soon. drop: a call that lets the engine drop buffers."""
    until = time.monotonic() + seconds(10)
    looks = 0
    while any(reference() is not None for reference in references) and time.monotonic() < until:
        drop()
        looks += 1
        if looks % 100 == 0:
            gc.collect()  # an exception's frames may be a cycle
        time.sleep(0.001)
    return all(reference() is None for reference in references)
