"""Which ranks of a CPU job have ended, and which unexpected end was the first."""

from __future__ import annotations

import sys
from collections.abc import Mapping

from ppfleetx.distributed.cpu.wire import PeerLostError

_LONGEST = 2000  # characters of another rank's error


class EndedRanks:
    """The ranks that have ended, and why. The caller holds the lock.

    Args:
        rank: of this process.
        names: of the others, for messages.
    """

    def __init__(self, rank: int, names: Mapping[int, str]) -> None:
        self._rank, self._names = rank, names
        self._reasons: dict[int, str] = {}
        self._cause: tuple[int, str] | None = None  # the first that ended as it should not have

    def __contains__(self, rank: int) -> bool:
        return rank in self._reasons

    @property
    def is_broken(self) -> bool:
        """Whether a rank has been lost that the job cannot go on without."""
        return self._cause is not None

    def add(self, rank: int, reason: str, *, failed: bool) -> bool:
        """Note that ``rank`` has ended; returns whether it is the first failure of the job."""
        if rank in self._reasons:
            return False
        self._reasons[rank] = reason
        if not failed or self.is_broken:
            return False
        self._cause = rank, reason
        return True

    def add_goodbye(self, rank: int, text: str, lost: int) -> bool:
        """Note the goodbye of ``rank``: it ends with the error ``text``, or because rank ``lost`` is gone
        (-1: none is). Returns whether it is the first failure of the job.
        """
        if lost < 0 or lost == self._rank:
            if lost == self._rank:
                text = f"it lost the connection to this rank: {text}"
            return self.add(rank, text or "it has ended", failed=bool(text))
        is_first = not self.is_broken
        if is_first:  # the lost rank is the cause, even if this rank still has a connection to it
            self._cause = lost, f"{text} (says {self._names[rank]})"
        self.add(rank, f"it ended because {self._names[lost]} is gone", failed=False)
        return is_first

    def sentence(self) -> str:
        """Who is gone and why. There must be one."""
        assert self._cause is not None
        rank, reason = self._cause
        return f"rank {self._rank}: {self._names[rank]} is gone: {reason}"

    def error(self, text: str, rank: int) -> PeerLostError:
        """The error of ``text``, which waits for ``rank`` (-1: none) and cannot complete.

        The cause is the first rank that failed; the one waited for may only have followed it.
        """
        cause, reason = self._cause or (rank, self._reasons[rank])
        waiting = "" if rank in (cause, -1) else f" (waiting for rank {rank})"
        return PeerLostError(f"rank {self._rank}: in {text}{waiting}: {self._names[cause]} is gone: {reason}")

    def farewell(self) -> tuple[str, int]:
        """What this process sends to the others when it ends: its error, and the rank whose loss caused it
        (-1: none).
        """
        if self._cause is not None:
            return self._cause[1][:_LONGEST], self._cause[0]
        failure = getattr(sys, "last_value", None)  # what Python prints at the end of a program
        if failure is None:
            return "", -1
        return f"it failed with {type(failure).__name__}: {failure}"[:_LONGEST], -1
