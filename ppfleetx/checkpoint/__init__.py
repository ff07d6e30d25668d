"""Read and write checkpoints. :func:`register_formats` registers the readers of other programs' formats,
which are in :mod:`ppfleetx.conversion`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ppfleetx.checkpoint.reader import Checkpoint


class ForeignFormats:
    """Interface to the readers of other programs' checkpoint formats. This base class supports no format."""

    def described(self, path: Path) -> str | None:
        """Return a message that names the program that wrote the checkpoint at ``path`` and says how to
        convert the checkpoint. Returns None if the checkpoint is not recognized or needs no conversion."""

    def is_readable(self, path: Path) -> bool:
        return False

    def open(self, path: Path) -> Checkpoint:
        """Open another program's checkpoint for reading. Call this only if `is_readable` is true for
        ``path``. Raises CheckpointError if the checkpoint is damaged."""
        raise AssertionError(f"nothing reads {path}")


_formats = ForeignFormats()


def foreign_formats() -> ForeignFormats:
    return _formats


def register_formats(formats: ForeignFormats) -> None:
    """Register the object that reads other programs' checkpoints."""
    global _formats
    _formats = formats
