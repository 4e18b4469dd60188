"""The switch's log: one line a fact, as key=value for programs, with the sentence for people at its end."""

from __future__ import annotations

import logging
import re
import time

log = logging.getLogger("netfold.switch")

# What needs no quotes: nothing in it ends a value or a line.
_PLAIN = re.compile(r"[\w.:/+*#\[\]-]+")


def say(level: int, event: str, text: str, **fields: object) -> None:
    """Log `text`, a sentence, as an `event` with `fields`; a field that is None is left out."""
    log.log(level, "%s", text, extra={"event": event, "fields": fields})


class OneLine(logging.Formatter):
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
