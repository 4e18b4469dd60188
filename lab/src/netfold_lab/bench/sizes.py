"""Sweeps of message sizes, and dtypes with their exact integers. Pure."""

from dataclasses import dataclass


def sweep(begin_bytes: int, end_bytes: int, factor: int) -> list[int]:
    """Return begin, begin * factor, ... up to and not beyond end. Raises ValueError."""
    if begin_bytes < 1 or end_bytes < begin_bytes:
        raise ValueError(f"-b {begin_bytes} and -e {end_bytes} leave no size; 1 <= b <= e is wanted")
    if factor < 2:
        raise ValueError(f"-f {factor} does not grow; it must be 2 or more")
    sizes = []
    size_bytes = begin_bytes
    while size_bytes <= end_bytes:
        sizes.append(size_bytes)
        size_bytes *= factor
    return sizes


@dataclass(frozen=True)
class Dtype:
    torch_name: str
    item_bytes: int
    exact_below: int  # every whole number below has a value of its own, and sums below are exact


DTYPES = {
    "f32": Dtype("float32", 4, 2**24),
    "f64": Dtype("float64", 8, 2**53),
    "f16": Dtype("float16", 2, 2**11),
    "bf16": Dtype("bfloat16", 2, 2**8),
    "i32": Dtype("int32", 4, 2**31),
    "i64": Dtype("int64", 8, 2**63),
}


def parse_dtypes(text: str) -> list[str]:
    """Read `f32`, `f32,bf16` or `all`. Raises ValueError."""
    names = list(DTYPES) if text == "all" else text.split(",")
    for name in names:
        parse_dtype(name)
    return names


def parse_dtype(name: str) -> Dtype:
    if name not in DTYPES:
        raise ValueError(f"dtype {name!r} is not known; there are {', '.join(DTYPES)} and all")
    return DTYPES[name]
