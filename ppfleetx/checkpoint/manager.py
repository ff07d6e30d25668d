"""Save checkpoints, from a single process or from all ranks of a job, in the foreground or in the background.
Each rank writes its slices of the tensors; rank 0 writes the manifest, which lists them all."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from ppfleetx.checkpoint.manifest import Manifest, rank_directory, step_directory
from ppfleetx.checkpoint.output_dir import SAVING, describe_os_error
from ppfleetx.checkpoint.run_ownership import Ownership
from ppfleetx.checkpoint.slices import TensorSlice
from ppfleetx.checkpoint.writer import MAX_FILE_BYTES, RankIndex, commit, saving, write_rank
from ppfleetx.config.errors import CheckpointError, UserError
from ppfleetx.distributed.context import ParallelContext
from ppfleetx.distributed.coordination import beat_seconds, gather_numbers, joint_errors
from ppfleetx.resilience.flight_recorder import RECORD
from ppfleetx.utils.log import get_logger

Result = TypeVar("Result")

_THREAD = "checkpoint"


class SharedSave:
    """One save of a checkpoint by all ranks of a job, which must share the file system of ``output_dir``.

    Every rank calls `open`, `write`, `publish` and `close`, in this order. `close` must be called even if an
    earlier step failed. `complete` does the whole save.

    Args:
        documents: contents of ``config.yaml`` and the tokenizer files, by path in the checkpoint.
        ownership: which old checkpoints may be replaced and deleted; None: none.
        max_file_bytes: maximum size of the tensor data in a file; larger data is split into several files. A
            slice that is larger has a file of its own.
        verify: whether to read all data back and check it before the checkpoint gets its name.
        description: further attributes of the :class:`Manifest`, such as ``plan``.
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
        max_file_bytes: int = MAX_FILE_BYTES,
        verify: bool = True,
        **description: Any,
    ) -> None:
        self._ctx, self._output_dir, self._at = ctx, output_dir, (epoch, step)
        self._max_file_bytes, self._verify = max_file_bytes, verify
        self._ownership, self._documents = ownership, documents
        self._description = {"epoch": epoch, "step": step, "state": state, **description}
        self._stack = ExitStack()

    def open(self) -> None:
        """On rank 0, lock the output directory and create the hidden directory that all ranks write to."""
        if self._ctx.is_main:
            self._stack.enter_context(saving(self._output_dir, *self._at))

    def write(self, pieces: Iterable[TensorSlice]) -> RankIndex | None:
        """Write this rank's slices of the tensors. No other rank may write the same slices. Returns an index
        of the files and slices written, to pass to `publish`; None if this rank has no slices."""
        pieces = list(pieces)
        place = rank_directory(**self._ctx.plan.coordinates(self._ctx.rank))
        if not pieces:
            return None
        return write_rank(
            self._staged, place, pieces, max_file_bytes=self._max_file_bytes, verify=self._verify
        )

    def publish(self, written: Sequence[RankIndex | None]) -> None:
        """On rank 0, write the documents and the manifest, rename the checkpoint to its final name, update
        the file ``latest``, and delete the run's old checkpoints. Raises CheckpointError if the files are
        incomplete or damaged, or if a checkpoint of the same name must not be replaced.

        Args:
            written: the results of `write` on all ranks, in the order of the ranks.
        """
        if not self._ctx.is_main:
            return
        ranks = [
            {"rank": rank, **self._ctx.plan.coordinates(rank), "directory": index and index.directory}
            for rank, index in enumerate(written)
        ]
        manifest = Manifest(files={}, tensors={}, ranks=tuple(ranks), **self._description)
        indices = [index for index in written if index is not None]
        commit(self._staged, manifest, indices, self._ownership, self._documents)

    def close(self) -> None:
        self._stack.close()

    def complete(self, pieces: Iterable[TensorSlice]) -> Path:
        """Do the whole save, and return the path of the checkpoint. ``pieces`` are this rank's slices."""
        self.on_all_ranks(self.open)
        try:
            indices = self.gather_indices(self.on_all_ranks(lambda: self.write(pieces)))
            self.on_all_ranks(lambda: self.publish(indices))
        finally:
            self.close()
        return self.path

    def on_all_ranks(self, act: Callable[[], Result]) -> Result:
        """Call the function ``act`` on every rank, and return its result on this rank. If ``act`` raises
        OSError or CheckpointError on any rank, all ranks raise CheckpointError. Any other error ends all
        ranks (:func:`raise_on_all_ranks`)."""
        try:
            with joint_errors(self._ctx):
                try:
                    return act()
                except OSError as error:
                    raise CheckpointError(describe_os_error(error) + _how_to_make_room(error)) from error
        except UserError as error:
            raise CheckpointError(
                f"checkpoint {self.path.name} could not be written to {self._output_dir}: {error}. "
                "Earlier checkpoints are unchanged."
            ) from error

    def gather_indices(self, index: RankIndex | None) -> list[RankIndex | None]:
        """Return the ``index`` of every rank, in the order of the ranks."""
        if self._ctx.world_size == 1:
            return [index]
        from paddle import distributed

        indices: list[RankIndex | None] = []
        distributed.all_gather_object(indices, index)
        return indices

    @property
    def path(self) -> Path:
        """The path of the checkpoint when it is complete."""
        return self._output_dir / step_directory(*self._at)

    @property
    def _staged(self) -> Path:
        return self._output_dir / f"{SAVING}{self.path.name}"


def save_checkpoint(
    output_dir: str | Path,
    *,
    epoch: int,
    step: int,
    tensors: Iterable[TensorSlice],
    state: Mapping[str, Any],
    **options: Any,
) -> Path:
    """Save a checkpoint from a single process. Returns its directory `output_dir/epoch_{E}_step_{S}`.

    Args:
        tensors: slices that together make up every tensor.
        options: optional arguments of :class:`SharedSave`.

    Raises CheckpointError if the checkpoint cannot be written. Earlier checkpoints are then unchanged.
    """
    save = SharedSave(ParallelContext.single(), Path(output_dir), epoch, step, state=state, **options)
    return save.complete(tensors)


class CheckpointManager:
    """Saves checkpoints into one output directory in the foreground: `save` returns when it is done.

    Args:
        ownership: which old checkpoints may be replaced and deleted; None: none.
        ctx: the ranks that save together; None: this process saves alone.
        save_options: further optional arguments of `SharedSave`, such as `plan`, for every save.
    """

    def __init__(
        self,
        output_dir: str | Path,
        ownership: Ownership | None = None,
        *,
        ctx: ParallelContext | None = None,
        **save_options: Any,
    ) -> None:
        self.output_dir, self.ownership = Path(output_dir), ownership
        self._ctx, self._save_options = ctx or ParallelContext.single(), save_options

    def save(
        self, *, epoch: int, step: int, tensors: Iterable[TensorSlice], state: Mapping[str, Any]
    ) -> Path:
        """Save a checkpoint and return its path. All ranks must call this, and pass each tensor slice on one
        rank only. If the checkpoint cannot be written, all ranks raise CheckpointError, and earlier
        checkpoints are unchanged."""
        return _logged(self._save_of(epoch, step, state).complete(list(tensors)))

    def _save_of(self, epoch: int, step: int, state: Mapping[str, Any]) -> SharedSave:
        what = {"state": state, "ownership": self.ownership, **self._save_options}
        return SharedSave(self._ctx, self.output_dir, epoch, step, **what)

    def wait_for_copy(self) -> None:
        """Wait until the tensors passed to `save` may be changed. Returns at once after a foreground save."""

    def poll(self) -> Path | None:
        """Return the path of the checkpoint that a background save has just completed, or None."""

    def wait(self) -> Path | None:
        """Wait for a background save to complete, and return the path of its checkpoint. Returns None if no
        save is in progress."""

    def abandon(self) -> None:
        """End a background save when this process stops with an error. Does not communicate with other
        ranks."""


class BackgroundManager(CheckpointManager):
    """Saves checkpoints in the background, one at a time. All ranks must call `poll` and `wait` in the same
    order. Each rank needs host memory for a copy of the data that it writes."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._copier, self._is_copied = HostCopier(), threading.Event()
        self._is_copied.set()  # there is nothing to copy
        self._task: Future | None = None
        self._save: SharedSave | None = None
        self._is_written = False

    def save(
        self, *, epoch: int, step: int, tensors: Iterable[TensorSlice], state: Mapping[str, Any]
    ) -> Path:
        """Start a save, and return the path that the checkpoint will have.

        The tensors must not change before `wait_for_copy` returns. If writing fails, `poll` or `wait` raises
        the error.
        """
        assert self._task is None, "a save is still under way"
        pieces = list(tensors)
        save = self._save_of(epoch, step, state)
        save.on_all_ranks(save.open)
        self._save = save
        self._is_written = self._ctx.world_size == 1  # a single process publishes without waiting for others
        try:
            copied, copy = save.on_all_ranks(lambda: self._copier.prepare(pieces))
        except BaseException:
            self._close()  # releases the lock of the output directory for the next save
            raise

        self._is_copied.clear()

        def write() -> Any:
            try:
                copy()
            finally:
                self._is_copied.set()
            index = save.write(copied)
            return save.publish([index]) if self._is_written else index

        self._task = _started(write)
        return save.path

    def wait_for_copy(self) -> None:
        if not self._is_copied.is_set():
            with RECORD.awaiting(_THREAD):
                self._is_copied.wait()

    def poll(self) -> Path | None:
        """Continue the save in progress without waiting. Returns the checkpoint's path if it is now complete,
        otherwise None. Raises CheckpointError on all ranks if the save failed on any."""
        if self._task is None:
            return None
        if not gather_numbers(self._ctx, [self._task.done()]).all():
            return None
        save = self._save
        try:
            # Only the main thread communicates, because otherwise collectives of saving and training could
            # interleave.
            result = save.on_all_ranks(self._task.result)
            if not self._is_written:
                indices = save.gather_indices(result)
                self._is_written, self._task = True, _started(lambda: save.publish(indices))
                return None
        except BaseException:
            self._close()
            raise
        self._close()
        return _logged(save.path)

    def wait(self) -> Path | None:
        path = None
        with RECORD.awaiting(_THREAD, polls=True):
            while self._task is not None:
                wait_for([self._task], beat_seconds())
                path = self.poll()
        return path

    def abandon(self) -> None:
        """End the save in progress when this process stops with an error. Waits until this process has
        written its part. Does not communicate with other ranks, so a save of several ranks may remain
        incomplete."""
        if self._task is None:
            return
        wait_for([self._task])
        try:
            if self._ctx.world_size == 1:  # otherwise publishing needs the slices of all ranks
                self.wait()
        except CheckpointError as error:
            get_logger().error(str(error))
        finally:
            self._close()

    def _close(self) -> None:
        if self._save is not None:
            self._save.close()
        self._task = self._save = None


def _logged(path: Path) -> Path:
    get_logger().info(f"saved {path}")
    return path


class HostCopier:
    """Copies tensors into host memory for a background save. The next save reuses this memory."""

    def __init__(self) -> None:
        self._kept: list[np.ndarray] = []

    def prepare(self, pieces: Sequence[TensorSlice]) -> tuple[list[TensorSlice], Callable[[], None]]:
        """Prepare a background save of the slices ``pieces``. Returns slices to write in their place, and a
        function that copies into host memory those arrays that the next optimizer update changes
        (`TensorSlice.changes_with_update`). Call the function once, from any thread, before that update and
        before the slices are written."""
        live, copies = [], []
        for piece in pieces:
            if piece.changes_with_update:
                data = partial(self._copy_of, len(live))
                live.append(piece.array())
            else:
                data = piece.array() if piece.fetch is None else piece.fetch()
            copies.append(replace(piece, data=data, changes_with_update=False, fetch=None))
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


def _started(act: Callable[[], Any]) -> Future:
    """Start ``act`` in a daemon thread, and return a Future for its result."""
    future: Future = Future()

    def run() -> None:
        try:
            future.set_result(act())
        except BaseException as error:  # noqa: BLE001 - re-raised by `Future.result`
            future.set_exception(error)

    threading.Thread(target=run, name=_THREAD, daemon=True).start()
    return future


def _how_to_make_room(error: OSError) -> str:
    """Return what to do about a full disk; "" after another ``error``."""
    if error.errno not in (errno.ENOSPC, errno.EDQUOT):
        return ""
    return (
        "; make room, or let Engine.save_load.keep_max delete older checkpoints (there must be room for one "
        "more, because a new one is written before the oldest is deleted)"
    )
