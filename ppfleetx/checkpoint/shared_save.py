"""One checkpoint written by all ranks of a job: each its own slices, the first the manifest."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeVar

from ppfleetx.checkpoint.directory import SAVING, describe_os_error
from ppfleetx.checkpoint.manifest import Manifest, rank_directory, step_directory
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
    keep_max: int | None = None,
    **description: Any,
) -> Path:
    """Save a checkpoint; every rank calls this, with the slices it is the one to write.

    The directory must be the same for all ranks (a file system shared by the nodes). Arguments as of
    :func:`ppfleetx.checkpoint.writer.save_checkpoint`.

    Raises:
        CheckpointError: on all ranks, when one of them could not write; it is named.
    """
    staged = output_dir / f"{SAVING}{step_directory(epoch, step)}"
    at = {axis: ctx.rank_on(axis) for axis in ("mp", "sharding", "pp")}
    own_dir, pieces = rank_directory(**at), list(tensors)
    with ExitStack() as stack:

        def open_directory() -> None:
            if ctx.is_main:
                stack.enter_context(saving(output_dir, epoch, step))

        _on_all(ctx, open_directory)
        written = _on_all(ctx, lambda: write_rank(staged, own_dir, pieces) if pieces else None)
        ranks = [
            {"rank": rank, "directory": _directory_of(index)} for rank, index in enumerate(written) if index
        ]
        manifest = Manifest(
            step=step, epoch=epoch, files={}, tensors={}, state=state, ranks=tuple(ranks), **description
        )
        indices = [index for index in written if index is not None]

        def publish() -> str | None:
            return str(commit(staged, manifest, indices, keep_max=keep_max)) if ctx.is_main else None

        return Path(_on_all(ctx, publish)[0])


def _directory_of(index: RankIndex) -> str:
    return next(iter(index.files)).split("/")[0]


def _on_all(ctx: ParallelContext, act: Callable[[], Result]) -> list[Result]:
    """Let every rank act, wait for all, and give all results; an error of one is an error of all."""
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
