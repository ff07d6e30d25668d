"""Record which ranks of a CPU job have ended, and ask ranks that this one waits for what they are doing."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Mapping, Sequence

from ppfleetx.distributed.cpu.inbox import mismatch
from ppfleetx.distributed.cpu.operation import Operation
from ppfleetx.distributed.cpu.wire import (
    QUERY,
    STATE,
    OutOfStepError,
    Peer,
    PeerLostError,
    Signature,
    make_header,
)

_LONGEST = 2000  # characters of another rank's error


class EndedRanks:
    """The ranks that have ended, and why. Callers must hold the lock.

    Args:
        rank: rank of this process.
        names: the names of the other ranks, for messages.
    """

    def __init__(self, rank: int, names: Mapping[int, str]) -> None:
        self._rank, self._names = rank, names
        self._reasons: dict[int, str] = {}
        self._cause: tuple[int, str] | None = None  # the first rank that failed, and why

    def __contains__(self, rank: int) -> bool:
        return rank in self._reasons

    @property
    def is_broken(self) -> bool:
        """Whether a rank has failed, so that the job cannot continue."""
        return self._cause is not None

    def add(self, rank: int, reason: str, *, failed: bool) -> bool:
        """Record that ``rank`` has ended. Returns whether this is the first failure of the job."""
        if rank in self._reasons:
            return False
        self._reasons[rank] = reason
        if not failed or self.is_broken:
            return False
        self._cause = rank, reason
        return True

    def add_goodbye(self, rank: int, text: str, lost: int) -> bool:
        """Record the goodbye of ``rank``, which ends with the error ``text``, or because rank ``lost`` is
        gone (-1: none is). Returns whether this is the first failure of the job.
        """
        if lost < 0 or lost == self._rank:
            if lost == self._rank:
                text = f"it lost the connection to this rank: {text}"
            return self.add(rank, text or "it has ended", failed=bool(text))
        is_first = not self.is_broken
        if is_first:  # the lost rank is the cause, even if this rank is still connected to it
            self._cause = lost, f"{text} (says {self._names[rank]})"
        self.add(rank, f"it ended because {self._names[lost]} is gone", failed=False)
        return is_first

    def sentence(self) -> str:
        """Say which rank is gone and why. A rank must have failed."""
        assert self._cause is not None
        rank, reason = self._cause
        return f"rank {self._rank}: {self._names[rank]} is gone: {reason}"

    def error(self, text: str, rank: int) -> PeerLostError:
        """The error for the operation ``text``, which waits for ``rank`` (-1: none) and cannot complete.

        It names the first rank that failed, because ``rank`` may have ended only as a consequence.
        """
        cause, reason = self._cause or (rank, self._reasons[rank])
        waiting = "" if rank in (cause, -1) else f" (waiting for rank {rank})"
        return PeerLostError(f"rank {self._rank}: in {text}{waiting}: {self._names[cause]} is gone: {reason}")

    def farewell(self) -> tuple[str, int]:
        """The last message to the others: this process's error, and the rank that caused it (-1: none)."""
        if self._cause is not None:
            return self._cause[1][:_LONGEST], self._cause[0]
        failure = getattr(sys, "last_value", None)  # the error that Python prints at the end
        if failure is None:
            return "", -1
        return f"it failed with {type(failure).__name__}: {failure}"[:_LONGEST], -1


class Inquiry:
    """Asks the other ranks what they are doing when this rank has waited for long, and answers such
    questions.

    Args:
        rank: rank of this process.
        peers: the connections to the other ranks.
        state: the lock of everything that reader threads and the program share.
        pending: this rank's operations in progress.

    Attributes:
        blocked: the operation the program is waiting for; None while it does something else.
    """

    def __init__(
        self, rank: int, peers: Mapping[int, Peer], state: threading.Condition, pending: Sequence[Operation]
    ) -> None:
        self.blocked: Operation | None = None
        self._rank, self._peers, self._state, self._pending = rank, peers, state, pending
        self._issued: dict[int, dict[int, Signature]] = {}  # group -> number -> what this rank ran
        self._answers: dict[int, tuple[Signature | None, bool, str]] = {}

    def remember(self, operation: Operation) -> None:
        """Record that this rank runs the operation; the last 256 of each group are kept."""
        with self._state:
            issued = self._issued.setdefault(operation.group, {})
            issued[operation.number] = operation.signature
            issued.pop(operation.number - 256, None)

    def begin(self, operation: Operation) -> None:
        """Record that the program starts to wait for ``operation``."""
        with self._state:
            self.blocked = operation
            self._answers.clear()

    def end(self) -> None:
        """Record that the program has stopped waiting."""
        with self._state:
            self.blocked = None

    def ask(self, operation: Operation, ends: EndedRanks) -> None:
        """Ask the ranks that ``operation`` waits for, and that have not ended, what they are doing."""
        with self._state:
            self._answers.clear()
            missing = [rank for rank in operation.missing() if rank not in ends]
        point_to_point = int(operation.number < 0)
        for rank in missing:
            with contextlib.suppress(OSError):
                self._peers[rank].send(
                    make_header(
                        QUERY, operation.signature, point_to_point, operation.group, max(operation.number, 0)
                    )
                )

    def answer(self, peer: Peer, group: int, number: int, point_to_point: int) -> None:
        """Tell ``peer`` which operation this rank ran under that number, and which one it is waiting for."""
        with self._state:
            issued = None if point_to_point else self._issued.get(group, {}).get(number)
            blocked = self.blocked
            text = "no communication (computing, or reading data)" if blocked is None else blocked.text
            waits = blocked is not None and len(self._pending) == 1 and peer.rank in blocked.missing()
            flags = (1 if issued is not None else 0) | (2 if waits else 0)
            payload = text.encode()
            frame = make_header(
                STATE, issued, flags, group, peer.frames_sent, len(payload), peer.frames_received
            )
        peer.reply(frame + payload)

    def record_answer(
        self, peer: Peer, issued: Signature, flags: int, sent: int, received: int, text: str
    ) -> None:
        """Record an answer, and the frames ``peer`` has sent and received. The caller holds ``state``."""
        # Nothing is in flight when each side has received all that the other has sent.
        quiet = (sent, received) == (peer.frames_received, peer.frames_sent)
        self._answers[peer.rank] = (issued if flags & 1 else None, bool(flags & 2) and quiet, text)

    def judge(self, operation: Operation, suspicion: int) -> int:
        """Look for ranks that run another operation, or that wait for this rank while this rank waits for
        them.

        Args:
            operation: the operation this rank waits for.
            suspicion: the return value of the previous call, 0 at first.

        Raises:
            OutOfStepError: a rank runs another operation, or two ranks wait for each other.
        """
        waiting = False
        for rank in operation.missing():
            issued, waits_for_us, text = self._answers.get(rank, (None, False, ""))
            # If the peer runs the same operation, its message is on the way: the link or the sender is slow.
            if issued is not None and issued != operation.signature:
                raise OutOfStepError(mismatch(self._rank, rank, operation.text, issued))
            if waits_for_us and len(self._pending) == 1:
                waiting = True
                # Only after several answers, because one answer may have crossed a message in flight.
                if suspicion >= 2:
                    raise OutOfStepError(
                        f"rank {self._rank}: waiting for rank {rank} in {operation.text}, while rank {rank} "
                        f"waits for this rank in {text}; the ranks do not run the same operations "
                        "in the same order"
                    )
        return suspicion + 1 if waiting else 0

    def describe(self, operation: Operation) -> str:
        """Name the ranks that ``operation`` waits for, and their last reported activities."""
        missing = operation.missing()
        known = [f"rank {r} was in {self._answers[r][2]}" for r in missing if r in self._answers]
        names = ", ".join(self._peers[rank].name for rank in missing)
        return f"{names} in {operation.text}" + (f" ({'; '.join(known)})" if known else "")
