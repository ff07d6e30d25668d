"""Background operations: how many start, and in which order."""

from __future__ import annotations

import threading
from collections.abc import Iterator

from ppfleetx.distributed.cpu.operation import (
    MAX_RUNNING_REDUCTIONS,
    BufferPool,
    Inbox,
    Operation,
    ProgressThread,
)
from ppfleetx.distributed.cpu.wire import Signature
from tests.helpers.waiting import wait_for

SIGNATURE = Signature(1, 0, 4, -1)


class Background:
    """A progress thread, and the operations it has started and finished."""

    def __init__(self) -> None:
        self.state = threading.Condition(threading.Lock())
        self.pending: list[Operation] = []
        self.inbox = Inbox(0, self.state, BufferPool(0))
        self.progress = ProgressThread(self.state, self.pending, self._advance)
        self.begun: list[str] = []
        self.ended: list[str] = []

    def _advance(self, operation: Operation) -> None:
        operation.advance()
        with self.state:
            operation.busy = False
            if operation.done:
                self.pending.remove(operation)
            self.state.notify_all()

    def begin(self, group: int, number: int, *, is_reduction: bool = True) -> None:
        name = f"{group}/{number}"

        def steps() -> Iterator[list]:
            self.begun.append(name)
            view = memoryview(bytearray(4))
            yield self.inbox.post([((1, group, 0, number), SIGNATURE, view)])
            self.ended.append(name)

        operation = Operation(
            self.inbox,
            lambda _: None,
            steps(),
            text=name,
            group=group,
            background=True,
            is_reduction=is_reduction,
        )
        self.progress.begin(operation)

    def arrive(self, group: int, number: int) -> None:
        self.inbox.receive((1, group, 0, number), SIGNATURE, 4, lambda view: None)


def test_so_many_sums_of_a_group_are_started_and_no_more() -> None:
    background = Background()
    for number in range(5):
        background.begin(7, number)
    background.begin(8, 0)  # behind all of them, and not kept waiting: another group
    wait_for(lambda: len(background.begun) == MAX_RUNNING_REDUCTIONS + 1)
    assert background.begun == ["7/0", "7/1", "8/0"]
    background.arrive(7, 1)
    wait_for(lambda: background.ended == ["7/1"] and len(background.begun) == 4)
    assert background.begun[-1] == "7/2"
    for number in (0, 2, 3, 4):
        background.arrive(7, number)
    background.arrive(8, 0)
    wait_for(lambda: len(background.ended) == 6)
    assert [name for name in background.begun if name.startswith("7")] == [f"7/{n}" for n in range(5)]
    assert background.pending == []
