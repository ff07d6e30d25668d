"""The commands of ppfleetx: one module for each verb (subcommand) or group of verbs.

Importing this package registers the reader of FleetX checkpoints, so every command can read them. All
functions raise UserError (`config/errors.py`) if the user made a mistake.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ppfleetx.checkpoint import ForeignFormats, register_formats

if TYPE_CHECKING:
    from ppfleetx.checkpoint.reader import Checkpoint


class _Converters(ForeignFormats):
    """Lets the checkpoint package recognize checkpoints of other toolkits, and open FleetX checkpoints."""

    # The conversion modules are slow to import, so they are imported only for a directory that is not in the
    # format of ppfleetx.
    def described(self, path: Path) -> str | None:
        from ppfleetx.conversion.detect import described

        return described(path)

    def is_readable(self, path: Path) -> bool:
        from ppfleetx.conversion.fleetx import is_fleetx

        return is_fleetx(path)

    def open(self, path: Path) -> Checkpoint:
        from ppfleetx.conversion.fleetx import open_fleetx

        return open_fleetx(path)


register_formats(_Converters())
