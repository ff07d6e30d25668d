"""Checkpoints, and a registry of foreign formats. Importing the registry does not import the readers."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ppfleetx.checkpoint.reader import Checkpoint


class ForeignFormats:
    """Checkpoint formats of other programs. This base class knows none."""

    def described(self, path: Path) -> str | None:
        """Return sentences that say what ``path`` is and how to convert it, starting with the path; None if
        unknown."""

    def is_readable(self, path: Path) -> bool:
        return False

    def open(self, path: Path) -> Checkpoint:
        """Open a readable directory to load weights from. Raises CheckpointError."""
        raise AssertionError(f"nothing reads {path}")


_formats = ForeignFormats()


def foreign_formats() -> ForeignFormats:
    return _formats


def read_also(formats: ForeignFormats) -> None:
    """Register the foreign formats that loading a checkpoint can read or explain."""
    global _formats
    _formats = formats
