"""Checkpoints, and the registry of the readers of other programs' formats (:func:`register_formats`). The
readers are in :mod:`ppfleetx.conversion`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ppfleetx.checkpoint.reader import Checkpoint


class ForeignFormats:
    """Interface to the readers of other programs' checkpoint formats. This base class reads none."""

    def described(self, path: Path) -> str | None:
        """Return a text that says which program's checkpoint ``path`` is and how to convert it; None if it is
        not recognized or needs no conversion."""

    def is_readable(self, path: Path) -> bool:
        return False

    def open(self, path: Path) -> Checkpoint:
        """Open another program's checkpoint for reading. Call this only if `is_readable` is true for
        ``path``. Raises CheckpointError if it is damaged."""
        raise AssertionError(f"nothing reads {path}")


_formats = ForeignFormats()


def foreign_formats() -> ForeignFormats:
    return _formats


def register_formats(formats: ForeignFormats) -> None:
    """Register the object that reads other programs' checkpoints."""
    global _formats
    _formats = formats
