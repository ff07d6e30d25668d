"""The commands. They also load FleetX checkpoints, and say how to convert checkpoints of other toolkits.

Every function here raises a UserError for a mistake of the user (`config/errors.py`); docstrings name errors
only where more is to be said.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ppfleetx.checkpoint import ForeignFormats, read_also

if TYPE_CHECKING:
    from ppfleetx.checkpoint.reader import Checkpoint


class _Converters(ForeignFormats):
    """The converters. They are imported only if a directory is not a checkpoint in our format."""

    def described(self, path: Path) -> str | None:
        from ppfleetx.conversion.detect import described

        return described(path)

    def is_readable(self, path: Path) -> bool:
        from ppfleetx.conversion.fleetx import is_fleetx

        return is_fleetx(path)

    def open(self, path: Path) -> Checkpoint:
        from ppfleetx.conversion.fleetx import open_fleetx

        return open_fleetx(path)


read_also(_Converters())
