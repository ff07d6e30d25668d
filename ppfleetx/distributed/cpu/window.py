"""How far ahead of an owner's sums a rank sends: the owner keeps what comes before it is wanted."""

from __future__ import annotations

from collections import defaultdict, deque

from ppfleetx.distributed.cpu.wire import Signature

AHEAD_MESSAGES = 2
AHEAD_BYTES = 32 << 20
MOST_MESSAGES = 256


class Window:
    """Messages of one rank in one group that their owners are not known to have added up.

    To each owner there are at most :data:`AHEAD_BYTES`, or :data:`AHEAD_MESSAGES` messages where these are
    larger, and never more than :data:`MOST_MESSAGES`, however small: each is remembered. The owner of a sum
    tells those who sent to it when the sum has ended; a sender waits for that before it sends something that
    would be more.

    No circle comes of it: a rank waits for ends of sums alone that its group began earlier. Take the first
    operation that has not ended, in the one order in which programs start them (docs/parallelism.md, "Why
    groups cannot wait for each other"). All before it have ended, so every member starts it and nobody who
    sends for it waits; reader threads take what arrives at any time; so it ends, then the next one does.
    """

    def __init__(self) -> None:
        self._sent: dict[int, deque[tuple[int, Signature]]] = defaultdict(deque)

    def admit(self, owner: int, number: int, signature: Signature) -> list[tuple[int, Signature]]:
        """The next sum to ``owner``, in the order of the program: those whose end it must wait for.

        Each is given once: whoever sends after this one need not ask for them again.
        """
        sent, first = self._sent[owner], []
        while len(sent) >= MOST_MESSAGES or (
            len(sent) >= AHEAD_MESSAGES and self._nbytes(sent) + signature.nbytes > AHEAD_BYTES
        ):
            first.append(sent.popleft())
        sent.append((number, signature))
        return first

    @staticmethod
    def _nbytes(sent: deque[tuple[int, Signature]]) -> int:
        return sum(signature.nbytes for _, signature in sent)
