"""The switch's log in logfmt: one line an event, key=value for programs, and a sentence for people at its end."""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import re
import select
import threading
import time
from collections.abc import Callable

log = logging.getLogger("netfold.switch")

# A value that needs no quotes: no character of it ends a value or a line.
_PLAIN = re.compile(r"[\w.:/+*#\[\]-]+")


def event(level: int, name: str, text: str, /, **fields: object) -> None:
    """Log the sentence `text` as event `name` with `fields`; fields that are None are left out."""
    log.log(level, "%s", text, extra={"event": name, "fields": fields})


class LogfmtFormatter(logging.Formatter):
    """`time=... level=... event=... key=value ... msg="..."`. Values are escaped, so a record is always one line."""

    def format(self, record: logging.LogRecord) -> str:
        when = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        pairs: dict[str, object] = {
            "time": f"{when}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "event": getattr(record, "event", record.name),
            **getattr(record, "fields", {}),
            "msg": record.getMessage(),
        }
        if record.exc_info:
            pairs["error"] = self.formatException(record.exc_info)
        return " ".join(f"{key}={_value(value)}" for key, value in pairs.items() if value is not None)


class QueuedHandler(logging.Handler):
    """Write lines to a file descriptor from a thread of their own, so that a reader that does not read delays nobody.

    At most MOST_LINES wait. Further lines are dropped; the next one that is written has their number as its field
    `dropped`. At the end of the process, `close` waits CLOSE_S for the reader.
    """

    MOST_LINES = 4096
    CLOSE_S = 1.0

    def __init__(self, descriptor: int) -> None:
        super().__init__()
        self._descriptor = descriptor
        self._lines: queue.Queue[bytes | None] = queue.Queue(self.MOST_LINES)
        self._dropped = 0
        self._writer = threading.Thread(target=self._write, name="netfold log", daemon=True)
        self._writer.start()

    def emit(self, record: logging.LogRecord) -> None:
        # `Handler.handle` calls this under the handler's lock.
        if self._lines.full():
            self._dropped += 1
            return
        if self._dropped:
            record.fields = {**getattr(record, "fields", {}), "dropped": self._dropped}
            self._dropped = 0
        self._lines.put_nowait(f"{self.format(record)}\n".encode(errors="backslashreplace"))

    def close(self) -> None:
        super().close()
        if self._writer.is_alive():
            with contextlib.suppress(queue.Full):
                self._lines.put(None, timeout=self.CLOSE_S)
                self._writer.join(self.CLOSE_S)

    def _write(self) -> None:
        while (line := self._lines.get()) is not None:
            try:
                while line:
                    line = line[os.write(self._descriptor, line) :]
            except BlockingIOError:
                select.select([], [self._descriptor], [])
            except OSError:  # the reader is gone, and so is its log
                pass


class RateLimit(logging.Filter):
    """Limit the lines of peers that may not join: BURST lines at once, then RATE_PER_S.

    The next line that passes has the number of dropped lines as its field `suppressed`.
    clock: seconds.
    """

    EVENTS = ("unauthenticated", "refused")
    BURST = 20
    RATE_PER_S = 1.0

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._tokens, self._refilled_s = float(self.BURST), clock()
        self._suppressed = 0

    def filter(self, record: logging.LogRecord) -> bool:
        if getattr(record, "event", "") not in self.EVENTS:
            return True
        now = self._clock()
        self._tokens = min(self.BURST, self._tokens + (now - self._refilled_s) * self.RATE_PER_S)
        self._refilled_s = now
        if self._tokens < 1:
            self._suppressed += 1
            return False
        self._tokens -= 1
        if self._suppressed:
            record.fields = {**getattr(record, "fields", {}), "suppressed": self._suppressed}
            self._suppressed = 0
        return True


def _value(value: object) -> str:
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    if _PLAIN.fullmatch(text):
        return text
    escaped = "".join(
        {'"': '\\"', "\\": "\\\\", "\n": "\\n", "\r": "\\r", "\t": "\\t"}.get(character)
        or (character if character.isprintable() else f"\\u{ord(character):04x}")
        for character in text
    )
    return f'"{escaped}"'
