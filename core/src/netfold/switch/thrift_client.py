"""A client of bmv2's runtime interface: Apache Thrift's binary protocol, as far as that interface uses it.

An argument is a pair of a type and a value; types are those of the interface's description (standard.thrift and
simple_pre_lag.thrift of behavioral-model).
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Sequence
from typing import Any

# Thrift's numbers of types.
_BOOL, _I32, _I64, _STRING, _STRUCT, _LIST = 2, 8, 10, 11, 12, 15
_CALL = 0x80010001
_REPLY, _EXCEPTION = 2, 3
# Bounds what a peer that is no bmv2 can make this client hold. The longest reply is a switch's program.
MAX_REPLY_BYTES = 1 << 26

Value = tuple[int, Any]


def boolean(value: bool) -> Value:
    return _BOOL, value


def i32(value: int) -> Value:
    return _I32, value


def i64(value: int) -> Value:
    return _I64, value


def string(value: bytes | str) -> Value:
    return _STRING, value.encode() if isinstance(value, str) else value


def record(**fields: Value) -> Value:
    """A struct; the name of a field is `_` and its number."""
    return _STRUCT, {int(name[1:]): value for name, value in fields.items()}


def strings(values: Sequence[bytes]) -> Value:
    return _LIST, (_STRING, [string(value) for value in values])


def records(values: Sequence[Value]) -> Value:
    return _LIST, (_STRUCT, values)


class ThriftError(OSError):
    """The peer refused a call, or is no Thrift server.

    code: of the exception that the interface declares; None for any other error.
    """

    def __init__(self, text: str, code: int | None = None) -> None:
        super().__init__(text)
        self.code = code


class ThriftClient:
    """One connection. Calls block for at most `timeout_s`. Raises OSError."""

    def __init__(self, host: str, port: int, timeout_s: float) -> None:
        self._stream = socket.create_connection((host, port), timeout_s)
        self._stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._serial = 0

    def close(self) -> None:
        self._stream.close()

    def call(self, service: str, method: str, *arguments: Value) -> Any:
        """Call `method` with its arguments in order; return its result as int, bytes, list or dict by field number."""
        self._serial += 1
        name = f"{service}:{method}".encode()
        message = [struct.pack(">II", _CALL, len(name)), name, struct.pack(">i", self._serial)]
        message.append(_packed((_STRUCT, dict(enumerate(arguments, 1)))))
        self._stream.sendall(b"".join(message))
        head, length = struct.unpack(">II", self._read(8))
        if head >> 16 != 0x8001 or length > MAX_REPLY_BYTES:
            raise ThriftError("the peer does not speak Thrift's binary protocol")
        self._read(length + 4)
        reply = self._value(_STRUCT)
        if head & 0xFF == _EXCEPTION:
            raise ThriftError(f"{method}: {reply.get(1, b'').decode(errors='replace')}")
        errors = [value for number, value in reply.items() if number != 0]
        if errors:
            code = errors[0].get(1)
            raise ThriftError(f"{method} was refused with code {code}", code)
        return reply.get(0)

    def _read(self, count: int) -> bytes:
        if count > MAX_REPLY_BYTES:
            raise ThriftError(f"a reply of {count} bytes")
        data = bytearray()
        while len(data) < count:
            more = self._stream.recv(count - len(data))
            if not more:
                raise ThriftError("the connection ended")
            data += more
        return bytes(data)

    def _value(self, kind: int) -> Any:
        if kind == _BOOL:
            return self._read(1) != b"\0"
        if kind in (_I32, _I64):
            return int.from_bytes(self._read(4 if kind == _I32 else 8), "big", signed=True)
        if kind == _STRING:
            return self._read(int.from_bytes(self._read(4), "big"))
        if kind == _STRUCT:
            fields = {}
            while field := self._read(1)[0]:
                number = int.from_bytes(self._read(2), "big")
                fields[number] = self._value(field)
            return fields
        if kind == _LIST:
            element, count = struct.unpack(">BI", self._read(5))
            if count > MAX_REPLY_BYTES:
                raise ThriftError(f"a reply with a list of {count}")
            return [self._value(element) for _ in range(count)]
        raise ThriftError(f"a reply with a value of type {kind}")


def _packed(value: Value) -> bytes:
    kind, content = value
    if kind == _BOOL:
        return b"\1" if content else b"\0"
    if kind == _I32:
        return int(content).to_bytes(4, "big", signed=True)
    if kind == _I64:
        return int(content).to_bytes(8, "big", signed=True)
    if kind == _STRING:
        return struct.pack(">I", len(content)) + bytes(content)
    if kind == _STRUCT:
        fields = [struct.pack(">BH", field[0], number) + _packed(field) for number, field in content.items()]
        return b"".join(fields) + b"\0"
    element, values = content
    return struct.pack(">BI", element, len(values)) + b"".join(_packed(each) for each in values)
