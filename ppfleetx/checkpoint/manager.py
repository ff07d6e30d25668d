"""What a training loop needs of checkpoints: save here, keep n, and where to continue from."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ppfleetx.checkpoint.directory import newest_good
from ppfleetx.checkpoint.reader import Checkpoint
from ppfleetx.checkpoint.slices import TensorSlice
from ppfleetx.checkpoint.writer import save_checkpoint
from ppfleetx.config.errors import CheckpointError
from ppfleetx.utils.log import get_logger


class CheckpointManager:
    """Saves into one output directory and keeps the newest `keep_max` checkpoints (None: all).

    Args:
        description: further arguments of `save_checkpoint` that stay the same for the whole run
            (`plan`, `config`, `fingerprints`, `vocab_size`, ...).
    """

    def __init__(self, output_dir: str | Path, keep_max: int | None = None, **description: Any) -> None:
        if keep_max is not None and keep_max < 1:
            raise ValueError(f"keep_max must be 1 or more, got {keep_max}")
        self.output_dir, self.keep_max = Path(output_dir), keep_max
        self._description = description

    def save(
        self, *, epoch: int, step: int, tensors: Iterable[TensorSlice], state: Mapping[str, Any]
    ) -> Path:
        """Save a checkpoint; arguments and errors of `save_checkpoint`."""
        return save_checkpoint(
            self.output_dir,
            epoch=epoch,
            step=step,
            tensors=tensors,
            state=state,
            keep_max=self.keep_max,
            **self._description,
        )

    def newest_good(self, *, verify: bool = True) -> Checkpoint | None:
        """The newest undamaged checkpoint or None; damaged ones are passed over with a warning."""
        found = newest_good(self.output_dir, verify=verify)
        if found is not None:
            get_logger().info(f"newest good checkpoint: {found.path}")
        return found


def check_fingerprints(
    checkpoint: Checkpoint, current: Mapping[str, str], *, reset_data: bool = False
) -> None:
    """Compare the identity of tokenizer and data with that of a checkpoint to be resumed.

    Args:
        current: what would be saved now, by key (`tokenizer`, `data`, ...); keys that either side does
            not have are not compared.
        reset_data: the data is meant to have changed (`Engine.save_load.reset_data`).

    Raises:
        CheckpointError: another tokenizer; or other data, and `reset_data` is not set.
    """
    saved = checkpoint.manifest.fingerprints
    for key in sorted(saved.keys() & current.keys()):
        if saved[key] == current[key]:
            continue
        if key == "tokenizer":
            raise CheckpointError(
                f"checkpoint {checkpoint.path} was trained with another tokenizer ({saved[key]}) than this "
                f"run's ({current[key]}): its weights have no meaning for these token ids"
            )
        if not reset_data:
            raise CheckpointError(
                f"the {key} of this run ({current[key]}) is not what checkpoint {checkpoint.path} was "
                f"trained on ({saved[key]}), so its position has no meaning; set "
                "Engine.save_load.reset_data to True to start the new data from its beginning"
            )
