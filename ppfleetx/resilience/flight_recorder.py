"""The last collectives that this process has called: one record for every kind of process group.

A call costs about five microseconds here. Nothing is looked at, compared or formatted before somebody asks:
shapes and tasks are only kept.
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
    """One call of a collective, or of a message between two ranks.

    Attributes:
        operation: its name, without what only says on which stream it runs.
        group: the process group.
        number: how many such calls the group has had before it: of all collectives together, or of the
            messages to, or from, one peer.
        peer: rank in the group that a message goes to or comes from; -1 of a collective.
        shape, dtype: of the tensor that this rank brings, where there is one.
        begun, ended: of the call, in seconds of the monotonic clock; 0.0 while it goes on.
        task: what it returned: says whether an operation that goes on in the background is done.
        asks: it only asks the other ranks whether they are done, and is no progress.
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
        """Whether this rank's part of it is over, as far as the task says."""
        if not self.ended:
            return False
        ask = getattr(self.task, "is_completed", None)
        return True if ask is None else bool(ask())


class CallRecord:
    """A ring of the last :data:`KEPT` calls.

    Attributes:
        blocked_on: set by a backend that knows which task the program waits for; gives it, or None.
        join_device: called in a thread before it asks tasks whether they are done.
        names: of groups, by Paddle's number of them ("mp").
        waited: seconds that this process has waited for other ranks, where a backend measures them.
        reads: the program waits until its device has done all it was given, collectives included.
        failed: the last call that has raised, or whose task has.
    """

    def __init__(self) -> None:
        self.calls: deque[Call] = deque(maxlen=KEPT)
        self.blocked_on: Callable[[], Any] | None = None
        self.join_device: Callable[[], None] = lambda: None
        self.names: dict[int, str] = {}
        self.waited, self.reads, self._asks = 0.0, False, False
        self.failed: Call | None = None
        self._failure: BaseException | None = None
        self._counts: dict[int, list[Any]] = {}
        self._nested = threading.local()

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """Around what waits for the device."""
        self.reads = True
        try:
            yield
        finally:
            self.reads = False

    @property
    def last_activity(self) -> float:
        """When a call last began or ended that does not only ask, in seconds of the monotonic clock; 0.0
        before the first."""
        found = next((call for call in reversed(list(self.calls)) if not call.asks), None)
        return 0.0 if found is None else max(found.begun, found.ended)

    @contextlib.contextmanager
    def asking(self) -> Iterator[None]:
        """Within, calls ask the other ranks whether they are done with something: however often that is
        done, it is no progress."""
        before, self._asks = self._asks, True
        try:
            yield
        finally:
            self._asks = before

    def note_failed(self, task: Any, error: BaseException) -> None:
        """The operation behind ``task`` has failed while the program waited for it."""
        call = next((call for call in reversed(list(self.calls)) if call.task is task), None)
        if call is not None:
            self.failed, self._failure = call, error

    def failed_with(self, error: BaseException) -> bool:
        """Whether it was ``error`` with which :attr:`failed` has failed."""
        return error is self._failure

    def begin(self, operation: str, group: Any, arguments: tuple[Any, ...]) -> Call:
        """Note a call that begins."""
        counts = self._counts.get(id(group))
        if counts is None:  # the group is kept, so that its id stays its own
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
        """``method`` of a process group, with each call noted; what it calls in its turn is not."""
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
                self.failed, self._failure = entry, error
                raise
            finally:
                nested.inside = False
                entry.ended = time.monotonic()
            return entry.task

        return call

    def record_class(self, cls: type, names: Iterable[str]) -> None:
        """Note the calls of those methods of ``cls`` from now on; names that it lacks are passed over."""
        for name in names:
            method = getattr(cls, name, None)
            if method is not None and not hasattr(method, "__wrapped__"):
                setattr(cls, name, self.recorded(method, operation_of(name)))

    def totals(self) -> Mapping[int, tuple[Any, int, Mapping[int, int], Mapping[int, int]]]:
        """Of each group: it, its collectives so far, its messages to each peer, and from each."""
        return {key: tuple(value) for key, value in list(self._counts.items())}

    def waited_for(self, thread: int) -> Call | None:
        """The call that ``thread`` waits for: one that has not returned, or that a backend names."""
        calls = list(self.calls)
        for call in reversed(calls):
            if not call.ended and call.thread == thread:
                return call
        task = None if self.blocked_on is None else self.blocked_on()
        return next((call for call in reversed(calls) if task is not None and call.task is task), None)

    def waited_for_main(self) -> Call | None:
        """The call that the main thread waits for."""
        return self.waited_for(threading.main_thread().ident or 0)

    def first_pending(self) -> Call | None:
        """The oldest call that is not done."""
        return next((call for call in list(self.calls) if not call.is_done), None)


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
"""Methods of Paddle's process groups that communicate."""

_SAME = {"allreduce": "all_reduce"}
_FORMS = ("_on_calc_stream", "_into_tensor", "_tensor", "_partial", "_single")


def operation_of(method: str) -> str:
    """The operation that a method of a process group is a form of."""
    for ending in _FORMS:
        method = method.removesuffix(ending)
    return _SAME.get(method, method)


def _tensor_in(arguments: tuple[Any, ...]) -> Any:
    """What this rank brings: the second tensor where the first is what it gets."""
    found = None
    for argument in arguments[:2]:
        one = argument[0] if isinstance(argument, list | tuple) and argument else argument
        if hasattr(one, "dtype"):
            found = one
    return found
