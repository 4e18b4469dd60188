"""A bench's ranks that wait for orders: a line to each, and what it measured as a line back."""

from __future__ import annotations

import json
import os
import socket
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from netfold.bench.start_line import StartLine

ORDERS = "orders"


class ToldRanks:
    """The bench's end. `folder` is for what ranks share; it goes with the bench."""

    def __init__(self, folder: str, server: socket.socket, size: int, deadline_s: float) -> None:
        self.folder = folder
        self._server = server
        self._size = size
        self._deadline_s = deadline_s
        self._streams: list[Any] = []

    def argv(self, file: str, *arguments: str) -> list[str]:
        """A rank's command: the bench's own file, with "rank", the folder and `arguments`.

        Whoever starts it sets RANK and WORLD_SIZE.
        """
        return [sys.executable, os.path.abspath(file), "rank", self.folder, *arguments]

    def wait(self) -> None:
        """Until all ranks have come for orders. TimeoutError where one does not."""
        for _ in range(self._size):
            connection = self._server.accept()[0]
            connection.settimeout(self._deadline_s)
            self._streams.append(connection.makefile("rw"))

    def tell(self, order: str) -> list[dict[str, Any]]:
        """Every rank does it; their answers, in no order. TimeoutError where one is silent, EOFError: one ended."""
        for stream in self._streams:
            stream.write(f"{order}\n")
            stream.flush()
        answers = [stream.readline() for stream in self._streams]
        if not all(answers):
            raise EOFError(f"a rank ended before it answered {order!r}; see its own output")
        return [json.loads(answer) for answer in answers]


@contextmanager
def told_ranks(size: int, deadline_s: float) -> Iterator[ToldRanks]:
    with tempfile.TemporaryDirectory(prefix="netfold-bench-") as folder, socket.socket(socket.AF_UNIX) as server:
        server.bind(f"{folder}/{ORDERS}")
        server.listen(size)
        server.settimeout(deadline_s)
        StartLine.draw(Path(folder, "line"), size)
        yield ToldRanks(folder, server, size, deadline_s)


class Orders:
    """A rank's end: `for order in orders: ...; orders.answer(...)`. Ends when the bench does."""

    def __init__(self, folder: str) -> None:
        self.rank, self.size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.line = StartLine(Path(folder, "line"), self.rank, self.size)
        self._connection = socket.socket(socket.AF_UNIX)
        self._path = f"{folder}/{ORDERS}"
        self._stream: Any = None

    def __iter__(self) -> Iterator[str]:
        """Tells the bench that this rank is ready, first."""
        with self._connection:
            self._connection.connect(self._path)
            self._stream = self._connection.makefile("rw")
            for order in self._stream:
                yield order.strip()

    def answer(self, measured: dict[str, Any]) -> None:
        self._stream.write(json.dumps(measured) + "\n")
        self._stream.flush()
