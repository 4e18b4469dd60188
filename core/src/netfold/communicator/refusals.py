"""Notes why this rank refused a collective, for the ranks that wait in it (`Group.note_refusal`)."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

Method = TypeVar("Method", bound=Callable[..., Any])


def noted(group: str) -> Callable[[Method], Method]:
    """Decorate the method of one collective. group: the attribute of its object that holds the `Group`.

    Costs one call, so not for a method that small operations use.
    """

    def decorate(method: Method) -> Method:
        @functools.wraps(method)
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                return method(self, *args, **kwargs)
            except (ValueError, TypeError) as error:
                getattr(self, group).note_refusal(error)
                raise

        return call  # type: ignore[return-value]

    return decorate
