"""Record the last collectives that this process called, for every kind of process group.

Recording a call costs about 5 microseconds, because shapes and tasks are only stored. They are inspected and
formatted when a report is made.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

KEPT = 100
_SENDS, _RECEIVES = ("send", "isend"), ("recv", "irecv")


class Call:
    """A call of a collective or of a point-to-point message.

    Attributes:
        operation: name of the operation, without the stream.
        group: process group.
        number: number of earlier calls of the group: collectives, or messages to or from the same peer.
        peer: rank in the group that receives or sends the message; -1 for a collective.
        shape, dtype: shape and type of this rank's input tensor, if there is one.
        begun, ended: times in seconds of the monotonic clock; ``ended`` is 0.0 while the call runs.
        task: return value of the call, which knows whether a background operation is done.
        asks: whether the call only polls other ranks, which does not count as progress.
    """

    __slots__ = (
        "asks",
        "begun",
        "dtype",
        "ended",
        "group",
        "number",
        "operation",
        "peer",
        "shape",
        "task",
        "thread",
    )

    def __init__(self, operation: str, group: Any, number: int, peer: int, shape: Any, dtype: Any) -> None:
        self.operation, self.group, self.number, self.peer = operation, group, number, peer
        self.shape, self.dtype = shape, dtype
        self.begun, self.ended, self.task, self.asks = time.monotonic(), 0.0, None, False
        self.thread = threading.get_ident()

    @property
    def is_done(self) -> bool:
        """Whether this rank's part of the call is done, as far as the task knows."""
        if not self.ended:
            return False
        ask = getattr(self.task, "is_completed", None)
        return True if ask is None else bool(ask())


class CallRecord:
    """A ring buffer of the last :data:`KEPT` calls.

    Attributes:
        blocked_on: a function that returns the task that the program waits for, or None; set by backends that
            know the task.
        join_device: a function called in a thread before the thread asks tasks whether they are done.
        names: names of groups ("mp") by Paddle's group id.
        waited: seconds that this process has waited for other ranks, if the backend measures them.
        reads: whether the program waits for its device, and therefore for all collectives on it.
        failed, failure: last call that raised an error, or whose task did, and the error.
    """

    def __init__(self) -> None:
        self.calls: deque[Call] = deque(maxlen=KEPT)
        self.blocked_on: Callable[[], Any] | None = None
        self.join_device: Callable[[], None] = lambda: None
        self.names: dict[int, str] = {}
        self.waited, self.reads, self._asks = 0.0, False, False
        self.failed: Call | None = None
        self.failure: BaseException | None = None
        self._counts: dict[int, list[Any]] = {}
        self._nested = threading.local()

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        self.reads = True
        try:
            yield
        finally:
            self.reads = False

    @property
    def last_activity(self) -> float:
        """The time (monotonic clock) when a call that counts as progress last began or ended; 0.0 if there
        was none."""
        found = next((call for call in reversed(list(self.calls)) if not call.asks), None)
        return 0.0 if found is None else max(found.begun, found.ended)

    @contextlib.contextmanager
    def asking(self) -> Iterator[None]:
        """Context manager for calls that only poll other ranks. They do not count as progress."""
        before, self._asks = self._asks, True
        try:
            yield
        finally:
            self._asks = before

    def note_failed(self, task: Any, error: BaseException) -> None:
        """Record that the operation of ``task`` failed while the program waited for it."""
        call = next((call for call in reversed(list(self.calls)) if call.task is task), None)
        if call is not None:
            self.failed, self.failure = call, error

    def begin(self, operation: str, group: Any, arguments: tuple[Any, ...]) -> Call:
        counts = self._counts.get(id(group))
        if counts is None:  # a reference to the group keeps its id unique
            counts = self._counts[id(group)] = [group, 0, defaultdict(int), defaultdict(int)]
        peer = -1
        if operation.startswith(_SENDS):
            peer = int(arguments[1])
            number = counts[2][peer]
            counts[2][peer] = number + 1
        elif operation.startswith(_RECEIVES):
            peer = int(arguments[1])
            number = counts[3][peer]
            counts[3][peer] = number + 1
        else:
            number = counts[1]
            counts[1] = number + 1
        tensor = _tensor_in(arguments)
        shape, dtype = (None, None) if tensor is None else (tensor.shape, tensor.dtype)
        call = Call(operation, group, number, peer, shape, dtype)
        call.asks = self._asks
        self.calls.append(call)
        return call

    def recorded(self, method: Callable[..., Any], operation: str) -> Callable[..., Any]:
        """Wrap ``method`` of a process group so that its calls are recorded, except nested calls."""
        nested = self._nested

        @functools.wraps(method)
        def call(group: Any, *args: Any, **kwargs: Any) -> Any:
            if getattr(nested, "inside", False):
                return method(group, *args, **kwargs)
            nested.inside = True
            entry = self.begin(operation, group, args or tuple(kwargs.values()))
            try:
                entry.task = method(group, *args, **kwargs)
            except BaseException as error:
                self.failed, self.failure = entry, error
                raise
            finally:
                nested.inside = False
                entry.ended = time.monotonic()
            return entry.task

        return call

    def record_class(self, cls: type, names: Iterable[str]) -> None:
        """Record all calls of the methods ``names`` of ``cls``. Missing methods are skipped."""
        for name in names:
            method = getattr(cls, name, None)
            if method is not None and not hasattr(method, "__wrapped__"):
                setattr(cls, name, self.recorded(method, operation_of(name)))

    def totals(self) -> Mapping[int, tuple[Any, int, Mapping[int, int], Mapping[int, int]]]:
        """Return for each group: the group, its number of collectives, and the numbers of messages to and
        from each peer."""
        return {key: tuple(value) for key, value in list(self._counts.items())}

    def waited_for(self, thread: int) -> Call | None:
        """Return the call that ``thread`` waits for: a call that has not returned, or the call that the
        backend waits for."""
        calls = list(self.calls)
        for call in reversed(calls):
            if not call.ended and call.thread == thread:
                return call
        task = None if self.blocked_on is None else self.blocked_on()
        return next((call for call in reversed(calls) if task is not None and call.task is task), None)


RECORD = CallRecord()
"""The record of this process."""

OPERATIONS = tuple(
    f"{name}{stream}"
    for name in (
        "all_reduce",
        "allreduce",
        "all_gather",
        "all_gather_into_tensor",
        "all_gather_partial",
        "all_to_all",
        "all_to_all_single",
        "all_to_all_tensor",
        "barrier",
        "broadcast",
        "gather",
        "recv",
        "recv_partial",
        "reduce",
        "reduce_scatter",
        "reduce_scatter_tensor",
        "scatter",
        "scatter_tensor",
        "send",
        "send_partial",
    )
    for stream in ("", "_on_calc_stream")
)
"""The methods of Paddle's process groups that communicate."""

_SAME = {"allreduce": "all_reduce"}
_FORMS = ("_on_calc_stream", "_into_tensor", "_tensor", "_partial", "_single")


def operation_of(method: str) -> str:
    """Return the name of the operation that a method of a process group performs."""
    for ending in _FORMS:
        method = method.removesuffix(ending)
    return _SAME.get(method, method)


def _tensor_in(arguments: tuple[Any, ...]) -> Any:
    """Return the input tensor among the arguments: the second argument if the first is the output."""
    found = None
    for argument in arguments[:2]:
        one = argument[0] if isinstance(argument, list | tuple) and argument else argument
        if hasattr(one, "dtype"):
            found = one
    return found
