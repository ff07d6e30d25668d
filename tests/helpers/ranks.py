"""Ranks for tests: processes forked from one that has imported Paddle, each running functions by name.

One *nursery* process per test process imports Paddle and all of ppfleetx, runs no operator, and forks ranks
on request, so that ranks start in milliseconds and no thread pool is cut in half by the fork. It forks whole
programs too (``tests/helpers/programs.py``). A pool of ranks stays alive and
takes one call after another: ``pool.run("tests.distributed.cpu.cases:all_reduce", dtype="float32")`` imports
the module in every rank and calls the function with the given JSON values; what it returns must be JSON.

Ranks on GPUs are executed anew instead of forked: CUDA does not survive a fork.

Nothing outlives the session: the nursery leads a process group that is killed as a whole, and it and every
rank ask the kernel to die with their parent.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import importlib
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from ppfleetx.config.parallel_plan import ParallelPlan
from ppfleetx.utils.log import configure_logging
from tests.helpers import programs
from tests.helpers.programs import ROOT

START_SECONDS = CALL_SECONDS = 180.0


@dataclass
class Outcome:
    """The result of one call in one rank: a value, an error, or the rank's death."""

    value: Any = None
    error: str | None = None  # "Type: message"
    trace: str = ""
    died: bool = False


def fields_of(plan: ParallelPlan) -> dict[str, Any]:
    """The plan's fields that differ from one card's."""
    return {f.name: getattr(plan, f.name) for f in fields(plan) if getattr(plan, f.name) != f.default}


class RanksFailedError(AssertionError):
    """At least one rank did not return a value."""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


# -- in the test process ------------------------------------------------------------------------


class Nursery:
    """The process that forks ranks and programs; :func:`shared_nursery` is the one to use."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        for name in [n for n in environment if n.startswith(("PADDLE_", "MASTER_", "CUSTOM_DEVICE_"))]:
            del environment[name]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.helpers.ranks", str(theirs.fileno())],
            cwd=ROOT,
            env=environment,
            pass_fds=[theirs.fileno()],
            start_new_session=True,
        )
        theirs.close()

    @property
    def pid(self) -> int:
        return self._process.pid

    def fork(self, settings: dict[str, str], log: Path, *, executed: bool = False) -> socket.socket:
        """A new rank with these environment variables; returns the connection to it.

        Args:
            executed: it imports Paddle by itself, instead of being forked from what has.
        """
        ours, theirs = socket.socketpair()
        message = {"settings": settings, "log": str(log), **({"executed": True} if executed else {})}
        self.send(message, [theirs.fileno()])
        theirs.close()
        return ours

    def preload(self, modules: Sequence[str]) -> None:
        """Import more modules, for the ranks that are forked from now on."""
        self.send({"preload": list(modules)}, [])

    def send(self, message: dict[str, Any], descriptors: list[int]) -> None:
        socket.send_fds(self._socket, [json.dumps(message).encode()], descriptors)

    def close(self) -> None:
        """End the nursery and every rank."""
        self._socket.close()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


@functools.cache
def shared_nursery() -> Nursery:
    """The nursery of this process, started on first use and closed at exit."""
    nursery = Nursery()
    atexit.register(nursery.close)
    return nursery


class RankPool:
    """``size`` ranks of one job.

    Args:
        nursery: forks them.
        device: ``cpu``, or the name of a kind of card, of which each rank has one.
        executed: they import Paddle by themselves, as ranks with a card always do.
        environment: more variables.
    """

    def __init__(
        self, nursery: Nursery, size: int, *, device: str = "cpu", executed: bool = False, **environment: str
    ) -> None:
        self.size, self.usable, self.calls = size, True, 0
        self._directory = tempfile.TemporaryDirectory(prefix="ranks-")
        self.pids: list[int] = []
        endpoints = [f"127.0.0.1:{free_port()}" for _ in range(size)]
        self._logs = [Path(self._directory.name) / f"rank{rank}.log" for rank in range(size)]
        self._sockets = []
        for rank, endpoint in enumerate(endpoints):
            settings = {
                "PADDLE_TRAINER_ID": str(rank),
                "PADDLE_TRAINERS_NUM": str(size),
                "PADDLE_CURRENT_ENDPOINT": endpoint,
                "PADDLE_TRAINER_ENDPOINTS": ",".join(endpoints),
                "PADDLE_MASTER": endpoints[0],
                "PADDLE_LOCAL_SIZE": str(size),
                **_settings_of(device, rank),
                **environment,
            }
            executes = executed or device != "cpu"
            self._sockets.append(nursery.fork(settings, self._logs[rank], executed=executes))
        self._buffers = [b""] * size
        started = self._collect(set(range(size)), START_SECONDS)
        self.pids = [outcome.value for outcome in started]
        assert all(self.pids), "a rank did not start"

    def call(self, target: str, *, timeout: float = CALL_SECONDS, **arguments: Any) -> list[Outcome]:
        """Run ``target`` ("module:function") in every rank; what did not end in time is killed."""
        assert self.usable, "a pool whose ranks failed is not used again"
        self.calls += 1
        request = json.dumps({"target": target, "arguments": arguments}).encode() + b"\n"
        for connection in self._sockets:
            with contextlib.suppress(OSError):
                connection.sendall(request)
        outcomes = self._collect(set(range(self.size)), timeout)
        self.usable = all(outcome.error is None and not outcome.died for outcome in outcomes)
        return outcomes

    def run(self, target: str, *, timeout: float = CALL_SECONDS, **arguments: Any) -> list[Any]:
        """:meth:`call`, returning the values by rank.

        Raises:
            RanksFailedError: with the errors, tracebacks and the end of the output of the ranks that failed.
        """
        outcomes = self.call(target, timeout=timeout, **arguments)
        if not self.usable:
            raise RanksFailedError(self._report(target, outcomes))
        return [outcome.value for outcome in outcomes]

    def _report(self, target: str, outcomes: list[Outcome]) -> str:
        lines = [f"{target} on {self.size} ranks"]
        for rank, outcome in enumerate(outcomes):
            if outcome.error is not None or outcome.died:
                text = self._logs[rank].read_text(errors="replace") if self._logs[rank].exists() else ""
                lines += [f"--- rank {rank}: {outcome.error or 'died'}", outcome.trace, text[-2000:]]
        return "\n".join(lines)

    def _collect(self, waiting: set[int], timeout: float) -> list[Outcome]:
        outcomes = [Outcome() for _ in range(self.size)]
        deadline = time.monotonic() + timeout
        with selectors.DefaultSelector() as selector:
            for rank in waiting:
                selector.register(self._sockets[rank], selectors.EVENT_READ, rank)
            while waiting:
                left = deadline - time.monotonic()
                if left <= 0:
                    self._give_up(waiting, outcomes, timeout)
                    break
                for key, _ in selector.select(left):
                    rank = key.data
                    if self._receive(rank, outcomes[rank]):
                        selector.unregister(self._sockets[rank])
                        waiting.discard(rank)
        return outcomes

    def _receive(self, rank: int, outcome: Outcome) -> bool:
        """Take what a rank sent; True when its answer is complete, or it is gone."""
        try:
            data = self._sockets[rank].recv(1 << 20)
        except OSError:
            data = b""
        if not data:
            outcome.died = True
            return True
        self._buffers[rank] += data
        if b"\n" not in self._buffers[rank]:
            return False
        line, _, self._buffers[rank] = self._buffers[rank].partition(b"\n")
        answer = json.loads(line)
        outcome.value, outcome.error = answer.get("value"), answer.get("error")
        outcome.trace = answer.get("trace", "")
        return True

    def _give_up(self, waiting: set[int], outcomes: list[Outcome], timeout: float) -> None:
        for rank in waiting:
            outcomes[rank].error = f"TimeoutError: no answer within {timeout:g} s"
        self.kill()

    def kill(self) -> None:
        """Kill every rank of this pool."""
        self.usable = False
        for pid in self.pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def close(self) -> None:
        self.kill()
        for connection in self._sockets:
            connection.close()
        self._directory.cleanup()


def _settings_of(device: str, rank: int) -> dict[str, str]:
    """The device variables that Paddle's launcher would set for a rank."""
    if device == "cpu":
        return {"PADDLE_DISTRI_BACKEND": "gloo", "PADDLE_CPU_COMM_TIMEOUT": "60"}
    place = {"PADDLE_LOCAL_RANK": str(rank), "PADDLE_RANK_IN_NODE": str(rank), "PADDLE_NNODES": "1"}
    backend = {} if device == "gpu" else {"PADDLE_DISTRI_BACKEND": "xccl", "PADDLE_XCCL_BACKEND": device}
    return {f"FLAGS_selected_{device}s": str(rank), **place, **backend}


class Pools:
    """Pools by size and environment, created on first use and again after a failure; ``with`` closes them.

    Args:
        preload: slow modules that all ranks will need.
        device: of all of them, as in :class:`RankPool`.
        most_calls: a pool is made anew after so many calls; 0: never. Each plan makes process groups, whose
            memory on a card Paddle does not give back.
        environment: more variables of all ranks.
    """

    def __init__(
        self, preload: Sequence[str] = (), *, device: str = "cpu", most_calls: int = 0, **environment: str
    ) -> None:
        self._preload, self._device, self._most_calls = preload, device, most_calls
        self._environment = environment
        self._pools: dict[tuple, RankPool] = {}

    def __call__(self, size: int, **environment: str) -> RankPool:
        nursery = shared_nursery()
        if self._preload:
            nursery.preload(self._preload)
            self._preload = ()
        key = (size, *sorted(environment.items()))
        pool = self._pools.get(key)
        is_worn = pool is not None and self._most_calls and pool.calls >= self._most_calls
        if pool is None or not pool.usable or is_worn:
            if pool is not None:
                pool.close()
            pool = RankPool(nursery, size, device=self._device, **self._environment, **environment)
            self._pools[key] = pool
        return pool

    def run(
        self, plan: ParallelPlan, target: str, *, timeout: float = CALL_SECONDS, **arguments: Any
    ) -> list[Any]:
        """Run ``target`` in the ranks of ``plan``, as :meth:`RankPool.run` does; ``plan`` (its fields) and
        ``world_size`` are among its arguments."""
        size = plan.world_size
        return self(size).run(target, timeout=timeout, plan=fields_of(plan), world_size=size, **arguments)

    def close(self) -> None:
        for pool in self._pools.values():
            pool.close()

    def __enter__(self) -> Pools:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


# -- in the nursery and the ranks ---------------------------------------------------------------


def _serve_forks(control: socket.socket) -> None:
    programs.die_with_parent()
    programs.hidden.load()  # the point of this process
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody asks for the exit codes of ranks
    while True:
        text, descriptors, _, _ = socket.recv_fds(control, 1 << 16, 4)
        if not text:
            return
        message = json.loads(text)
        if "preload" in message:
            for module in message["preload"]:
                importlib.import_module(module)
            continue
        connection, *streams = descriptors
        if os.fork() == 0:
            control.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            if message.pop("executed", False):
                _execute_rank(connection, message)
            elif "program" in message:
                programs.serve(socket.socket(fileno=connection), streams)
            else:
                _become_rank(socket.socket(fileno=connection), **message)
        for descriptor in descriptors:
            os.close(descriptor)


def _execute_rank(connection: int, message: dict[str, Any]) -> None:
    """In a fork of the nursery: start Python again, which knows nothing of what the nursery has loaded."""
    environment = {k: v for k, v in os.environ.items() if k != "FLAGS_use_stride_kernel"}
    os.set_inheritable(connection, True)
    command = [sys.executable, "-m", "tests.helpers.ranks", str(connection), json.dumps(message)]
    os.chdir(ROOT)
    os.execve(sys.executable, command, {**environment, **message["settings"]})


def _become_rank(connection: socket.socket, settings: dict[str, str], log: str) -> None:
    import paddle

    from ppfleetx.distributed.cpu.arrays import TensorMemory

    programs.die_with_parent()
    # Programs on a CPU switch views with strides off. Ranks have them, as on a GPU: Paddle's default.
    os.environ.pop("FLAGS_use_stride_kernel", None)
    paddle.set_flags({"FLAGS_use_stride_kernel": True})
    TensorMemory.takes_strided = False
    os.environ.update(settings)
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    configure_logging()
    os.dup2(output, 2)
    with connection.makefile("rwb") as stream:

        def answer(**fields: Any) -> None:
            stream.write(json.dumps(fields).encode() + b"\n")
            stream.flush()

        answer(value=os.getpid())
        for line in stream:
            request = json.loads(line)
            try:
                module, _, function = request["target"].partition(":")
                answer(value=getattr(importlib.import_module(module), function)(**request["arguments"]))
            except Exception as error:  # noqa: BLE001  (every failure is reported to the test)
                answer(error=f"{type(error).__name__}: {error}", trace=traceback.format_exc()[-6000:])
    os._exit(0)


if __name__ == "__main__":
    given = socket.socket(fileno=int(sys.argv[1]))
    if len(sys.argv) > 2:
        _become_rank(given, **json.loads(sys.argv[2]))
    _serve_forks(given)
