"""One checkpoint written by all ranks of a job: each its own slices, the first the manifest."""

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
    """Save a checkpoint; every rank calls this, with the slices it is the one to write.

    The directory must be the same for all ranks (a file system shared by the nodes). Arguments as of
    :func:`ppfleetx.checkpoint.writer.save_checkpoint`.

    Raises:
        CheckpointError: on all ranks, when one of them could not write; it is named.
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
    """The parts of one save in which the ranks do not communicate; between them, they do.

    All ranks `open`, then all `write`, then all `publish` with what every rank's `write` gave, and
    `close`, whatever became of it. Arguments as of `save_from_all_ranks`.
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
        """Take the output directory and make the directory to write into."""
        if self._ctx.is_main:
            self._stack.enter_context(saving(self._output_dir, *self._at))

    def write(self, pieces: Iterable[TensorSlice]) -> RankIndex | None:
        """Write this rank's slices; None when it has none."""
        pieces = list(pieces)
        place = rank_directory(**self._ctx.plan.coordinates(self._ctx.rank))
        return write_rank(self._staged, place, pieces) if pieces else None

    def publish(self, written: Sequence[RankIndex | None]) -> str | None:
        """On the main rank: make a checkpoint of what the ranks wrote; its path."""
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
        """Remove what did not become a checkpoint, and let go of the output directory."""
        self._stack.close()

    @property
    def _staged(self) -> Path:
        return self._output_dir / f"{SAVING}{step_directory(*self._at)}"


def on_all_ranks(ctx: ParallelContext, act: Callable[[], Result]) -> list[Result]:
    """Let every rank act, wait for all, and give all results; an error of one is an error of all.

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
