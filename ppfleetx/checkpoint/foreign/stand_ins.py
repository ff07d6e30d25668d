"""What stands for the names, objects and keys of a pickle that is read without being run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ppfleetx.config.errors import CheckpointError

_MAX_NAME = 200  # characters that a message shows
_SCALARS = (str, int, float, bool, bytes, type(None))


class RefusedPickleError(CheckpointError):
    """A pickle asks for more than arrays and containers. `wanted` is what it names."""

    def __init__(self, wanted: str) -> None:
        self.wanted = wanted if len(wanted) <= _MAX_NAME else f"{wanted[:_MAX_NAME]}..."
        super().__init__(self.wanted)


class UnsoundPickleError(ValueError):
    """What a pickle describes cannot be; says why. :meth:`Unpickler.load` adds the place."""


@dataclass(frozen=True, eq=False)
class Name:
    """A global name in a pickle. `build` is ours: it makes what a call of the name would make."""

    text: str
    build: Callable[..., Any]
    is_record: bool = False


@dataclass(eq=False, repr=False)
class Record:
    """Stands for an object of a class that is not there: its arguments and its state, and no behaviour."""

    class_name: str
    args: tuple[Any, ...] = ()
    state: Any = None
    items: list[Any] = field(default_factory=list)

    def __repr__(self) -> str:  # not what it holds, which may have no end
        return f"<{self.class_name}>"

    def set_state(self, state: Any) -> None:
        self.state = state

    def get(self, key: str, default: Any = None) -> Any:
        """An attribute out of the state; that of ``argparse.Namespace`` and most classes is a dictionary."""
        return self.state.get(key, default) if isinstance(self.state, dict) else default


def checked_key(key: Any) -> Any:
    """A key of a dictionary or member of a set.

    Raises UnsoundPickleError unless its hash is quickly computed and its own.

    The hash of a tuple can take for ever, and unequal large integers have the same one.
    """
    is_plain = type(key) in _SCALARS and not (type(key) is int and key.bit_length() > 60)
    if not is_plain and not isinstance(key, Name | Record):
        raise UnsoundPickleError("a key that is neither a text nor a number")
    return key
