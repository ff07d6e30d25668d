"""One communication operation under way, and the receives it still waits for."""

from __future__ import annotations

from collections.abc import Callable, Generator

from ppfleetx.distributed.cpu.inbox import Inbox, Receive
from ppfleetx.distributed.cpu.wire import Signature

Steps = Generator[list[Receive], None, None]


class Operation:
    """A communication under way: a generator that yields the receives it needs next.

    It is written as a generator so that whoever waits for one operation advances all the others too:
    two ranks may then wait for two asynchronous operations in different orders.

    Args:
        inbox: where its receives are posted.
        complete: waits for an operation.
        steps: the generator.
        text: for people.
        group, number: which operation of which group it is; ``number`` is -1 between two ranks.
        signature: what all who take part must agree on.
        background: it advances in the mesh's own thread while the program computes.
        takes_memory: it needs memory of its own for what it receives.

    Attributes:
        busy: a thread is advancing it. Set and reset under the mesh's ``state``.
        started: a thread has begun to advance it.
    """

    def __init__(
        self,
        inbox: Inbox,
        complete: Callable[[Operation], None],
        steps: Steps,
        *,
        text: str,
        group: int,
        number: int,
        signature: Signature,
        background: bool = False,
        takes_memory: bool = False,
    ) -> None:
        self.background, self.takes_memory = background, takes_memory
        self.busy = self.started = False
        self.text, self.group, self.number, self.signature = text, group, number, signature
        self._inbox, self._complete, self._steps = inbox, complete, steps
        self._receives: list[Receive] = []
        self.done = False
        self.failure: BaseException | None = None

    def ready(self) -> bool:
        """Whether some thread may advance it now."""
        return not self.busy and not self.done and self._has_arrived()

    def _has_arrived(self) -> bool:
        return all(receive.done for receive in self._receives)

    def missing(self) -> list[int]:
        """Ranks a message is still to come from."""
        return sorted({receive.key[0] for receive in self._receives if not receive.done})

    def advance(self) -> None:
        """Run until the next receives are not there yet."""
        self.started = True
        while not self.done and self._has_arrived():
            for receive in self._receives:
                self._inbox.settle(receive, self.text)
            try:
                self._receives = next(self._steps)
            except StopIteration:
                self.done, self._receives = True, []

    def withdraw(self, failure: BaseException) -> None:
        """Forget the posted receives of an operation that failed."""
        self.failure = failure
        self._inbox.unpost(self._receives)
        if not self.busy:  # else the thread that is at it comes to its end by itself
            self._steps.close()

    def wait(self, timeout: float | None = None) -> bool:
        self._complete(self)
        return True

    def is_completed(self) -> bool:
        return self.done

    def is_sync(self) -> bool:
        return self.done

    def synchronize(self) -> None:
        self._complete(self)
