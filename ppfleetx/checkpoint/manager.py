"""Save a checkpoint from all ranks of a job, in the foreground or in the background.

Each rank writes its slices; rank 0 writes the manifest. In a background save, a thread copies the state
during the next forward and backward passes, which only read parameters and optimizer state, and then writes
the copy. `wait_for_copy` is called before the optimizer update. Ranks communicate only in the main thread, so
that collectives of saving and training cannot interleave.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from ppfleetx.checkpoint.housekeeping import SAVING, describe_os_error
from ppfleetx.checkpoint.manifest import Manifest, rank_directory, step_directory
from ppfleetx.checkpoint.run_ownership import Ownership
from ppfleetx.checkpoint.slices import TensorSlice
from ppfleetx.checkpoint.writer import RankIndex, commit, saving, write_rank
from ppfleetx.config.errors import CheckpointError
from ppfleetx.distributed.context import ParallelContext
from ppfleetx.distributed.coordination import beat_seconds, gather_numbers
from ppfleetx.resilience.flight_recorder import RECORD
from ppfleetx.utils.log import get_logger

Result = TypeVar("Result")


class SharedSave:
    """The steps of one save. Ranks communicate only between the steps.

    All ranks call `open`, `write` with slices that no other rank writes, `publish` with the results of
    `write` from all ranks, and in any case `close`. The directory must be on a file system that all ranks
    share. The arguments are those of :func:`ppfleetx.checkpoint.writer.save_checkpoint`.
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
        """On rank 0: lock the output directory and create the temporary directory for the checkpoint."""
        if self._ctx.is_main:
            self._stack.enter_context(saving(self._output_dir, *self._at))

    def write(self, pieces: Iterable[TensorSlice]) -> RankIndex | None:
        """Write this rank's slices. Returns None if it has none."""
        pieces = list(pieces)
        place = rank_directory(**self._ctx.plan.coordinates(self._ctx.rank))
        return write_rank(self._staged, place, pieces) if pieces else None

    def publish(self, written: Sequence[RankIndex | None]) -> str | None:
        """On rank 0: complete and publish the checkpoint, and return its path."""
        if not self._ctx.is_main:
            return None
        ranks = [
            {"rank": rank, **self._ctx.plan.coordinates(rank), "directory": index and index.directory}
            for rank, index in enumerate(written)
        ]
        manifest = Manifest(files={}, tensors={}, ranks=tuple(ranks), **self._description)
        indices = [index for index in written if index is not None]
        return str(commit(self._staged, manifest, indices, self._ownership, self._documents))

    def close(self) -> None:
        self._stack.close()

    def on_all_ranks(self, act: Callable[[], Result]) -> list[Result]:
        """Run ``act`` on every rank and return the results of all ranks. Raises CheckpointError on every rank
        if ``act`` raised OSError or CheckpointError on any rank."""
        try:
            outcome = (act(), None)
        except OSError as error:
            outcome = (None, describe_os_error(error))
        except CheckpointError as error:
            outcome = (None, str(error))
        outcomes: list[tuple[Result, str | None]] = [outcome]
        if self._ctx.world_size > 1:
            from paddle import distributed

            outcomes = []
            distributed.all_gather_object(outcomes, outcome)
        failed = [f"rank {rank}: {error}" for rank, (_, error) in enumerate(outcomes) if error is not None]
        if failed:
            what = f"the checkpoint could not be saved; {'; '.join(failed)}"
            if self._ctx.world_size == 1:
                name = step_directory(*self._at)
                what = f"checkpoint {name} could not be written to {self._output_dir}: {outcome[1]}"
            raise CheckpointError(f"{what}. Earlier checkpoints are unchanged.")
        return [result for result, _ in outcomes]

    @property
    def _staged(self) -> Path:
        return self._output_dir / f"{SAVING}{step_directory(*self._at)}"


class CheckpointManager:
    """Saves checkpoints into one output directory, from one process or from all ranks of ``ctx``.

    Without ``ownership``, the checkpoints belong to no run, and none is replaced or deleted. ``description``
    are arguments of `save_checkpoint` that are constant during the run (`plan`, `config`, ...).
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
        """Save a checkpoint, with the arguments and errors of `save_checkpoint`. All ranks must call this,
        with slices that no other rank writes."""
        pieces, save = list(tensors), self._begin(epoch, step, state)
        try:
            indices = save.on_all_ranks(lambda: save.write(pieces))
            return _logged(save.on_all_ranks(lambda: save.publish(indices)))
        finally:
            save.close()

    def _begin(self, epoch: int, step: int, state: Mapping[str, Any]) -> SharedSave:
        what = {"state": state, "ownership": self.ownership, **self._description}
        save = SharedSave(self._ctx, self.output_dir, epoch, step, **what)
        save.on_all_ranks(save.open)
        return save

    def wait_for_copy(self) -> None:
        """Wait until the tensors passed to `save` may be changed. A foreground save never needs to wait."""

    def poll(self) -> Path | None:
        """Return the path of a checkpoint completed since `save` returned. A foreground save always returns
        None."""

    def wait(self) -> Path | None:
        """Wait for the save in progress, and return the same as `poll`."""

    def abandon(self) -> None:
        """Finish without communicating with the other ranks, which may have ended."""


class BackgroundManager(CheckpointManager):
    """A manager whose `save` returns at once and continues in the background. Only one save may run at a
    time.

    All ranks must call `poll` and `wait` in the same order; both report the result of the save, the same on
    all ranks. Needs host memory for a copy of the data that this rank writes.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._copier = HostCopier()
        self._task: Task | None = None
        self._save: SharedSave | None = None
        self._is_written = False

    def save(
        self, *, epoch: int, step: int, tensors: Iterable[TensorSlice], state: Mapping[str, Any]
    ) -> Path:
        """Start a save and return the path of the future checkpoint.

        The tensors must not be changed before `wait_for_copy` returns. Arguments and errors are those of
        `CheckpointManager.save`, but write errors are raised by `poll` and `wait`.
        """
        assert self._task is None, "a save is still under way"
        pieces, path = list(tensors), self.output_dir / step_directory(epoch, step)
        self._save = save = self._begin(epoch, step, state)
        self._is_written = self._ctx.world_size == 1  # a single process publishes without waiting for others
        try:
            copied, copy = self._copier.prepare(pieces)
        except BaseException:
            self._close()  # releases the lock of the output directory for the next save
            raise

        def write() -> Any:
            index = save.write(copied)
            return save.publish([index]) if self._is_written else index

        self._task = Task(write, first=copy)
        return path

    def wait_for_copy(self) -> None:
        if self._task is not None:
            self._task.first_done.wait()

    def poll(self) -> Path | None:
        """Advance the save in progress without waiting. Returns its path if it is now complete. Raises
        CheckpointError on all ranks if the save failed."""
        if self._task is None:
            return None
        if not gather_numbers(self._ctx, [self._task.done.is_set()]).all():
            return None
        save = self._save
        try:
            results = save.on_all_ranks(self._task.result)
        except BaseException:
            self._close()
            raise
        if not self._is_written:
            self._is_written, self._task = True, Task(lambda: save.publish(results))
            return None
        self._close()
        return _logged(results)

    def wait(self) -> Path | None:
        path = None
        while self._task is not None:
            self._task.done.wait(beat_seconds())
            with RECORD.asking():
                path = self.poll()
        return path

    def abandon(self) -> None:
        """End a save in progress without the other ranks: wait until this process has written its slices, but
        publish no checkpoint. In a job of one process, the save is completed."""
        if self._task is None:
            return
        self._task.done.wait()
        try:
            if self._ctx.world_size == 1:
                self.wait()
        except CheckpointError as error:
            get_logger().error(str(error))
        finally:
            self._close()

    def _close(self) -> None:
        if self._save is not None:
            self._save.close()
        self._task = self._save = None


def _logged(published: Sequence[str | None]) -> Path:
    get_logger().info(f"saved {published[0]}")
    return Path(published[0])


class HostCopier:
    """Copies tensors into host memory that is reused by the next save."""

    def __init__(self) -> None:
        self._kept: list[np.ndarray] = []

    def prepare(self, pieces: Sequence[TensorSlice]) -> tuple[list[TensorSlice], Callable[[], None]]:
        """Return slices that refer to a future copy, and a function that makes the copy. Call the function
        once, from any thread.

        The copy of a tensor on a device is queued now, before any operation that changes the tensor. Only the
        writing thread waits for it.
        """
        live, copies = [], []
        for piece in pieces:
            if piece.is_live:
                data = partial(self._copy_of, len(live))
                live.append(piece.array())
            else:
                data = piece.array() if piece.fetch is None else piece.fetch()
            copies.append(replace(piece, data=data, is_live=False, fetch=None))
        return copies, partial(self._copy, live)

    def _copy_of(self, number: int) -> np.ndarray:
        return self._kept[number]

    def _copy(self, live: Sequence[np.ndarray]) -> None:
        if [(a.shape, a.dtype) for a in live] != [(a.shape, a.dtype) for a in self._kept]:
            self._kept = []  # free the old memory before allocating
            try:
                self._kept = [np.empty_like(array) for array in live]
            except MemoryError as error:
                raise CheckpointError(
                    "there is not enough memory for a copy of the state; "
                    "Engine.save_load.async_save=False saves without a copy"
                ) from error
        for target, source in zip(self._kept, live, strict=True):
            np.copyto(target, source)


class Task:
    """Runs ``first`` and then ``act`` in a daemon thread. The event ``first_done`` is set in between."""

    def __init__(self, act: Callable[[], Any], first: Callable[[], None] | None = None) -> None:
        self.first_done, self.done = threading.Event(), threading.Event()
        self._act, self._first = act, first
        self._value: Any = None
        self._error: BaseException | None = None
        threading.Thread(target=self._run, name="checkpoint", daemon=True).start()

    def result(self) -> Any:
        assert self.done.is_set()
        if self._error is not None:
            raise self._error
        return self._value

    def _run(self) -> None:
        try:
            try:
                if self._first is not None:
                    self._first()
            finally:
                self.first_done.set()
            self._value = self._act()
        except BaseException as error:  # noqa: BLE001 - re-raised by `result`
            self._error = error
        finally:
            self.done.set()
