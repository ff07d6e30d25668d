"""Saving one checkpoint from all ranks of a job: each writes its slices, the first writes the manifest."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeVar

from ppfleetx.checkpoint.housekeeping import SAVING, describe_os_error
from ppfleetx.checkpoint.manifest import Manifest, rank_directory, step_directory
from ppfleetx.checkpoint.ownership import Ownership
from ppfleetx.checkpoint.slices import TensorSlice
from ppfleetx.checkpoint.writer import RankIndex, commit, saving, write_rank
from ppfleetx.config.errors import CheckpointError
from ppfleetx.distributed.context import ParallelContext

Result = TypeVar("Result")


def save_from_all_ranks(
    ctx: ParallelContext,
    output_dir: Path,
    *,
    epoch: int,
    step: int,
    tensors: Iterable[TensorSlice],
    state: Mapping[str, Any],
    ownership: Ownership | None = None,
    **description: Any,
) -> Path:
    """Save a checkpoint. Every rank calls this, with slices that no other rank writes.

    The directory must be on a file system that all ranks share. Arguments are those of
    :func:`ppfleetx.checkpoint.writer.save_checkpoint`.

    Raises:
        CheckpointError: on all ranks, if one of them could not write; names that rank.
    """
    pieces = list(tensors)
    save = SharedSave(ctx, output_dir, epoch, step, state=state, ownership=ownership, **description)
    on_all_ranks(ctx, save.open)
    try:
        indices = on_all_ranks(ctx, lambda: save.write(pieces))
        return Path(on_all_ranks(ctx, lambda: save.publish(indices))[0])
    finally:
        save.close()


class SharedSave:
    """The steps of one save. The ranks communicate between the steps, and not within them.

    All ranks `open`, then `write`, then `publish` with the results of all ranks' `write`, and `close` in any
    case. Arguments are those of `save_from_all_ranks`.
    """

    def __init__(
        self,
        ctx: ParallelContext,
        output_dir: Path,
        epoch: int,
        step: int,
        *,
        state: Mapping[str, Any],
        ownership: Ownership | None = None,
        documents: Mapping[str, bytes] | None = None,
        **description: Any,
    ) -> None:
        self._ctx, self._output_dir, self._at = ctx, output_dir, (epoch, step)
        self._ownership, self._documents = ownership, documents
        self._description = {"epoch": epoch, "step": step, "state": state, **description}
        self._stack = ExitStack()

    def open(self) -> None:
        """On the main rank: lock the output directory and make the directory to write into."""
        if self._ctx.is_main:
            self._stack.enter_context(saving(self._output_dir, *self._at))

    def write(self, pieces: Iterable[TensorSlice]) -> RankIndex | None:
        """Write this rank's slices; None if it has none."""
        pieces = list(pieces)
        place = rank_directory(**self._ctx.plan.coordinates(self._ctx.rank))
        return write_rank(self._staged, place, pieces) if pieces else None

    def publish(self, written: Sequence[RankIndex | None]) -> str | None:
        """On the main rank: make a checkpoint of what the ranks wrote, and return its path."""
        if not self._ctx.is_main:
            return None
        ranks = [
            {"rank": rank, **self._ctx.plan.coordinates(rank), "directory": _directory_of(index)}
            for rank, index in enumerate(written)
        ]
        manifest = Manifest(files={}, tensors={}, ranks=tuple(ranks), **self._description)
        indices = [index for index in written if index is not None]
        return str(commit(self._staged, manifest, indices, self._ownership, self._documents))

    def close(self) -> None:
        """Remove what did not become a checkpoint, and unlock the output directory."""
        self._stack.close()

    @property
    def _staged(self) -> Path:
        return self._output_dir / f"{SAVING}{step_directory(*self._at)}"


def on_all_ranks(ctx: ParallelContext, act: Callable[[], Result]) -> list[Result]:
    """Run ``act`` on every rank and return the results of all; an error on one is raised on all.

    Raises:
        CheckpointError: on every rank, if ``act`` raised an OSError or a CheckpointError on any.
    """
    from paddle import distributed

    try:
        outcome = (act(), None)
    except OSError as error:
        outcome = (None, describe_os_error(error))
    except CheckpointError as error:
        outcome = (None, str(error))
    outcomes: list[tuple[Result, str | None]] = []
    distributed.all_gather_object(outcomes, outcome)
    failed = [f"rank {rank}: {error}" for rank, (_, error) in enumerate(outcomes) if error is not None]
    if failed:
        raise CheckpointError(
            f"the checkpoint could not be saved; {'; '.join(failed)}. Earlier checkpoints are as they were."
        )
    return [result for result, _ in outcomes]


def _directory_of(index: RankIndex | None) -> str | None:
    return None if index is None else next(iter(index.files)).split("/")[0]
