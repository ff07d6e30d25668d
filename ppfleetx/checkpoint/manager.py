"""Saving checkpoints from a training loop."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from ppfleetx.checkpoint.ownership import Ownership
from ppfleetx.checkpoint.shared_save import save_from_all_ranks
from ppfleetx.checkpoint.slices import TensorSlice
from ppfleetx.checkpoint.writer import save_checkpoint
from ppfleetx.distributed.context import ParallelContext
from ppfleetx.utils.log import get_logger


class CheckpointManager:
    """Saves into one output directory.

    Args:
        output_dir: the directory.
        ownership: the run that saves, and what it keeps; None: the checkpoints belong to no run, and replace
            and delete nothing.
        ctx: the ranks that save together.
        description: further arguments of `save_checkpoint` that stay the same for the whole run
            (`plan`, `config`, `fingerprints`, `vocab_size`, ...).
    """

    def __init__(
        self,
        output_dir: str | Path,
        ownership: Ownership | None = None,
        *,
        ctx: ParallelContext | None = None,
        **description: Any,
    ) -> None:
        self.output_dir, self.ownership = Path(output_dir), ownership
        self._ctx, self._description = ctx or ParallelContext.single(), description

    def save(
        self, *, epoch: int, step: int, tensors: Iterable[TensorSlice], state: Mapping[str, Any]
    ) -> Path:
        """Save a checkpoint; arguments and errors are those of `save_checkpoint`.

        Every rank of the job calls this, with slices that no other rank writes.
        """
        several = self._ctx.world_size > 1
        save = partial(save_from_all_ranks, self._ctx) if several else save_checkpoint
        path = save(
            self.output_dir,
            epoch=epoch,
            step=step,
            tensors=tensors,
            state=state,
            ownership=self.ownership,
            **self._description,
        )
        get_logger().info(f"saved {path}")
        return path

    def wait_for_copy(self) -> None:
        """Return when the tensors given to `save` may change: here, at once."""

    def poll(self) -> Path | None:
        """Path of a checkpoint completed since `save` returned: here, none."""

    def wait(self) -> Path | None:
        """Like `poll`, after waiting for the save under way."""

    def abandon(self) -> None:
        """Stop without the other ranks of the job, which may be gone."""
