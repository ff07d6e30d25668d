"""Record the last collectives, sends and receives of this process, in every process group, for hang reports.
Recording a call costs about 5 microseconds."""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

KEPT = 100
_WAYS = {"send": ">", "recv": "<"}
Counts = Counter[tuple[str, int]]


@dataclass(slots=True, eq=False)
class Call:
    """One recorded call of a collective, or of a send or receive.

    Attributes:
        operation: name of the operation, such as ``all_reduce``.
        number: number of the call in its group, from 0. Collectives are counted together; sends to each rank
            and receives from each rank are counted separately.
        peer: the rank in the group to which a message is sent or from which it comes; -1 for a collective.
        shape, dtype: shape and element type of this rank's input tensor; None if there is none.
        asks: whether the call only polls other ranks. Such a call does not count as progress.
        begun, ended: times of the call and of its return (``time.monotonic``); ``ended`` is 0.0 until then.
        task: Paddle's task object, which the call returned.
    """

    operation: str
    group: Any
    number: int
    peer: int
    shape: Any
    dtype: Any
    asks: bool
    begun: float = field(default_factory=time.monotonic)
    ended: float = 0.0
    task: Any = None
    thread: int = field(default_factory=threading.get_ident)

    @property
    def is_done(self) -> bool:
        """Whether this rank's part of the operation is done. An asynchronous operation is done once its task
        reports completion, not when the call returns."""
        if not self.ended:
            return False
        ask = getattr(self.task, "is_completed", None)
        return True if ask is None else bool(ask())


class CallRecord:
    """The last :data:`KEPT` collectives, sends and receives of this process, and what the program waits for.

    Attributes:
        blocked_on: a function that returns the task for which the program is waiting, if there is one. Only
            the CPU process groups provide this function; with other communication libraries, the attribute is
            None.
        select_card_for_thread: a function that selects this process's card for the calling thread. A thread
            must call it before it queries tasks.
        names: names of process groups, such as "mp", by Paddle's group id.
        waited: seconds spent waiting for other ranks; 0 if the library does not measure it.
        reads: whether the program is reading a result from its device.
        helper: the main thread waits for threads whose names begin with this prefix; "" if it waits for none.
        polls: whether the main thread polls the other ranks while it waits for these threads.
        failed, failure: the last call that failed, and its error; None if no call has failed.
    """

    def __init__(self) -> None:
        self.calls: deque[Call] = deque(maxlen=KEPT)
        self.blocked_on: Callable[[], Any] | None = None
        self.select_card_for_thread: Callable[[], None] = lambda: None
        self.names: dict[int, str] = {}
        self.waited, self.reads, self.helper, self.polls = 0.0, False, "", False
        self.failed: Call | None = None
        self.failure: BaseException | None = None
        self._counts: dict[int, tuple[Any, Counts]] = {}
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
        """The time (``time.monotonic``) at which a call last began or returned; 0.0 if there was none. Polls
        do not count."""
        found = next((call for call in reversed(list(self.calls)) if not call.asks), None)
        return 0.0 if found is None else max(found.begun, found.ended)

    @contextlib.contextmanager
    def awaiting(self, helper: str, *, polls: bool = False) -> Iterator[None]:
        """Context manager in which the main thread waits for threads whose names begin with ``helper``. With
        ``polls``, the main thread also asks the other ranks again and again whether their threads are done.
        The watchdog does not count these polls as progress."""
        before = self.helper, self.polls
        self.helper, self.polls = helper, polls
        try:
            yield
        finally:
            self.helper, self.polls = before

    def note_failed(self, task: Any, error: BaseException) -> None:
        """Record that the call with this ``task`` failed with ``error`` while the program waited for the
        call."""
        call = next((call for call in reversed(list(self.calls)) if call.task is task), None)
        if call is not None:
            self.failed, self.failure = call, error

    def begin(self, operation: str, group: Any, arguments: tuple[Any, ...]) -> Call:
        if id(group) not in self._counts:
            self._counts[id(group)] = group, Counter()  # the reference to the group keeps its id unique
        counts, way = self._counts[id(group)][1], _WAYS.get(operation, "")
        peer = int(arguments[1]) if way else -1
        number = counts[way, peer]
        counts[way, peer] = number + 1
        tensor = _tensor_in(arguments)
        shape, dtype = (None, None) if tensor is None else (tensor.shape, tensor.dtype)
        call = Call(operation, group, number, peer, shape, dtype, self.polls)
        self.calls.append(call)
        return call

    def recorded(self, method: Callable[..., Any], operation: str) -> Callable[..., Any]:
        """Wrap a process group's ``method`` so that each call is recorded as ``operation``. Calls of other
        methods from inside ``method`` are not recorded."""
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
        """From now on, record all calls of the methods ``names`` of the process group class ``cls``. Methods
        that the class does not have are ignored."""
        for name in names:
            method = getattr(cls, name, None)
            if method is not None and not hasattr(method, "__wrapped__"):
                setattr(cls, name, self.recorded(method, operation_of(name)))

    def totals(self) -> list[tuple[Any, dict[tuple[str, int], int]]]:
        """Return each process group with a dictionary that counts its calls so far. The key ``("", -1)``
        counts the collectives, ``(">", 2)`` the messages to rank 2 of the group, and ``("<", 2)`` the
        messages from rank 2."""
        return [(group, dict(counts)) for group, counts in list(self._counts.values())]

    def waited_for(self, thread: int) -> Call | None:
        """Return the call in which ``thread`` is waiting, or None. A thread that polls other ranks also waits
        between two polls; the last poll is returned then."""
        calls = list(self.calls)
        for call in reversed(calls):
            if not call.ended and call.thread == thread:
                return call
        task = None if self.blocked_on is None else self.blocked_on()
        found = next((call for call in reversed(calls) if task is not None and call.task is task), None)
        if found is None and self.polls:
            found = next((call for call in reversed(calls) if call.asks and call.thread == thread), None)
        return found


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
    """Return the operation that a method of Paddle's process groups performs: ``all_gather`` for
    ``all_gather_into_tensor``, for example."""
    for ending in _FORMS:
        method = method.removesuffix(ending)
    return _SAME.get(method, method)


def _tensor_in(arguments: tuple[Any, ...]) -> Any:
    """Return the input tensor among a collective's ``arguments``. If the first two arguments are both tensors
    (or lists of tensors), it is the second, because the output comes first."""
    found = None
    for argument in arguments[:2]:
        one = argument[0] if isinstance(argument, list | tuple) and argument else argument
        if hasattr(one, "dtype"):
            found = one
    return found
