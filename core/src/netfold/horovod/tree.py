"""Trees of arrays (nested lists, tuples, dicts), and the conversion of arrays to NumPy and back."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import numpy as np

Array: TypeAlias = "np.ndarray[Any, Any]"

_SCALARS = (bool, int, float, complex, np.generic)


def leaves(tree: Any) -> list[Any]:
    """List the arrays of a tree, those of a dict by sorted key, so that all ranks agree. None contributes no array."""
    if tree is None:
        return []
    if isinstance(tree, Mapping):
        return [leaf for key in sorted(tree) for leaf in leaves(tree[key])]
    if isinstance(tree, list | tuple):
        return [leaf for child in tree for leaf in leaves(child)]
    return [tree]


def rebuilt(tree: Any, new: list[Any]) -> Any:
    """Return the same tree with the leaves `new`, in the order of `leaves`."""
    left = iter(new)

    def build(node: Any) -> Any:
        if node is None:
            return None
        if isinstance(node, Mapping):
            built = {key: build(node[key]) for key in sorted(node)}
            in_order: dict[Any, Any] = {key: built[key] for key in node}
            make: Callable[[dict[Any, Any]], Any] = type(node)
            return make(in_order)
        if isinstance(node, list | tuple):
            children = [build(child) for child in node]
            return type(node)(*children) if hasattr(node, "_fields") else type(node)(children)
        return next(left)

    return build(tree)


def host(leaf: Any) -> Array:
    """Return a leaf as a NumPy array: a view of its memory if the framework exports it, else a copy."""
    array = np.asarray(leaf)
    if array.dtype.hasobject:
        raise TypeError(f"a {type(leaf).__name__} is no array of numbers")
    return array


def restore(like: Any, array: Array) -> Any:
    """Convert `array` to the type of `like`: a NumPy array, a Python number, or another framework's array.

    Uses the array API standard (JAX), or the `from_dlpack` of the framework's module (torch). For a framework without
    either, returns the NumPy array.
    """
    if isinstance(like, np.ndarray):
        return array
    if isinstance(like, _SCALARS):
        return array if array.ndim else array[()] if isinstance(like, np.generic) else array.item()
    if hasattr(like, "__array_namespace__"):
        return like.__array_namespace__().asarray(array)
    module = sys.modules.get(type(like).__module__.partition(".")[0])
    return module.from_dlpack(array) if module is not None and hasattr(module, "from_dlpack") else array


def overwrite(leaf: Any, array: Array) -> Any:
    """Write `array` into a leaf and return the leaf. For an immutable leaf, return a new array of its type."""
    if not isinstance(leaf, _SCALARS):
        memory = host(leaf)
        if memory.flags.writeable:
            np.copyto(memory, array)
            return leaf
    return restore(leaf, array)
