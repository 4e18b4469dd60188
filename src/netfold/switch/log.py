"""The switch's log: one line a fact, as key=value for programs, with the sentence for people at its end."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable

log = logging.getLogger("netfold.switch")

# What needs no quotes: nothing in it ends a value or a line.
_PLAIN = re.compile(r"[\w.:/+*#\[\]-]+")


def event(level: int, name: str, text: str, /, **fields: object) -> None:
    """Log `text`, a sentence, as the event `name` with `fields`; a field that is None is left out."""
    log.log(level, "%s", text, extra={"event": name, "fields": fields})


class LogfmtFormatter(logging.Formatter):
    """`time=... level=... event=... key=value ... msg="..."`, whatever the values hold: one line stays one line."""

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


class RateLimit(logging.Filter):
    """Who may not join must not fill the log: of their lines some at once, and then one a second.

    The next line that is let through says how many were not, as `suppressed`. clock: seconds.
    """

    EVENTS = ("unauthenticated", "refused")
    BURST = 20
    RATE_PER_S = 1.0

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._left, self._since = float(self.BURST), clock()
        self._suppressed = 0

    def filter(self, record: logging.LogRecord) -> bool:
        if getattr(record, "event", "") not in self.EVENTS:
            return True
        now = self._clock()
        self._left = min(self.BURST, self._left + (now - self._since) * self.RATE_PER_S)
        self._since = now
        if self._left < 1:
            self._suppressed += 1
            return False
        self._left -= 1
        if self._suppressed:
            record.fields = {**getattr(record, "fields", {}), "suppressed": self._suppressed}
            self._suppressed = 0
        return True


def _value(value: object) -> str:
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    if _PLAIN.fullmatch(text):
        return text
    escaped = "".join(
        {'"': '\\"', "\\": "\\\\", "\n": "\\n", "\r": "\\r", "\t": "\\t"}.get(letter)
        or (letter if letter.isprintable() else f"\\u{ord(letter):04x}")
        for letter in text
    )
    return f'"{escaped}"'
