"""The thread in which collectives advance that the program does not wait for yet."""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING

from ppfleetx.distributed.cpu.operation import Operation

if TYPE_CHECKING:
    from ppfleetx.distributed.cpu.transport import Mesh


class Progress:
    """Advances operations in the background, those first that were begun first.

    Sending, and adding up what has come, release Python's lock: the program computes meanwhile. A rank's
    thread advances what is ready of any group, so groups cannot wait for each other in a circle.

    Args:
        mesh: whose operations.
    """

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._thread: threading.Thread | None = None

    def begin(self, operation: Operation) -> None:
        """Take an operation over; returns at once."""
        with self._mesh.state:
            self._mesh.pending.append(operation)
            self._mesh.state.notify_all()
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="cpu-comm-progress", daemon=True)
                self._thread.start()

    def _next(self) -> Operation | None:
        return next((o for o in self._mesh.pending if o.background and o.ready()), None)

    def _run(self) -> None:
        state = self._mesh.state
        while True:
            with state:
                state.wait_for(lambda: self._next() is not None)
                operation = self._next()
                operation.busy = True
            # Whoever waits for the operation is given the error.
            with contextlib.suppress(BaseException):
                self._mesh.advance(operation)
