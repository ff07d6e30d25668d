"""Other programs' checkpoints, as far as native ones know them: whoever reads those formats says so here."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from ppfleetx.checkpoint.reader import Checkpoint


class ForeignFormats(Protocol):
    """What can be done with a directory or file that holds no checkpoint of ours."""

    def described(self, path: Path) -> str | None:
        """What ``path`` is and how to convert it, in sentences that begin with the path; None if unknown."""

    def is_readable(self, path: Path) -> bool:
        """Whether ``path`` can be opened without a conversion."""

    def open(self, path: Path) -> Checkpoint:
        """Open a readable directory to load weights from. Raises CheckpointError."""


class _None:
    def described(self, path: Path) -> str | None:
        return None

    def is_readable(self, path: Path) -> bool:
        return False

    def open(self, path: Path) -> Checkpoint:
        raise AssertionError(f"nothing reads {path}")


_formats: ForeignFormats = _None()


def foreign_formats() -> ForeignFormats:
    """The formats that :func:`read_also` has named; none at first."""
    return _formats


def read_also(formats: ForeignFormats) -> None:
    """Let programs that load checkpoints read these formats, or say how to convert them."""
    global _formats
    _formats = formats
