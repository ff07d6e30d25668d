"""What becomes of training when a checkpoint cannot be saved (``Engine.save_load.on_save_error``)."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from ppfleetx.config.errors import CheckpointError, UserError
from ppfleetx.core.engine.run import Run
from ppfleetx.utils.log import get_logger


class Saver(Protocol):
    """Writes checkpoints of the engine as it stands, perhaps in the background.

    All ranks of a job call its methods together, and the same of them raise the same CheckpointError.
    """

    def save(self, run: Run) -> Any:
        """Save, or begin to."""

    def mark_best(self, run: Run) -> Any:
        """Remember the checkpoint of the engine as it stands, once complete, as the best."""

    def poll(self) -> Any:
        """Carry on with what is under way, and raise what became of it."""

    def wait(self) -> Any:
        """Complete what is under way."""

    def abandon(self) -> Any:
        """End without the other ranks, who may be gone. Raises nothing."""


class GuardedSaver:
    """A saver whose errors end training, or do not.

    Args:
        saver: who saves; None: nothing is ever saved.
        on_error: ``stop`` raises errors at once; ``continue`` reports them, and raises at the end of the
            run the one of the last save, because then nothing holds its result.
    """

    def __init__(self, saver: Saver | None, on_error: str) -> None:
        self._saver, self._stops = saver, on_error == "stop"
        self._failure: CheckpointError | None = None

    def save(self, run: Run) -> None:
        """Save, after what is still under way.

        Raises:
            CheckpointError: as configured.
        """
        if self._saver is None:
            return
        saver = self._saver
        self._guard(saver.wait)
        self._failure = None
        self._guard(lambda: saver.save(run))

    def mark_best(self, run: Run) -> None:
        """Complete what is under way and remember it as the best, unless it failed.

        Raises:
            CheckpointError: as configured.
        """
        if self._saver is None:
            return
        saver = self._saver
        self._guard(saver.wait)
        if self._failure is None:
            self._guard(lambda: saver.mark_best(run))

    def poll(self) -> None:
        """Learn, without waiting, what became of a save in the background.

        Raises:
            CheckpointError: as configured.
        """
        if self._saver is not None:
            self._guard(self._saver.poll)

    @contextlib.contextmanager
    def completing(self) -> Iterator[None]:
        """Within is the run; at its end, what is under way is completed if that is possible.

        Raises:
            CheckpointError: the last save failed.
        """
        try:
            yield
        except UserError:  # the same on all ranks, so they can still act together
            with contextlib.suppress(CheckpointError):
                self._finish()
            raise
        except Exception:
            if self._saver is not None:
                self._saver.abandon()
            raise
        self._finish()

    def _finish(self) -> None:
        if self._saver is not None:
            self._guard(self._saver.wait)
        if self._failure is not None:
            raise CheckpointError(f"{self._failure} The end of the run is thus not saved.")

    def _guard(self, act: Callable[[], Any]) -> None:
        try:
            act()
        except CheckpointError as error:
            if self._stops:
                raise
            self._failure = error
            get_logger().error(f"{error} Training goes on (Engine.save_load.on_save_error=continue).")
