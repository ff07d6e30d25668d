"""A process group for CPU tensors with the interface of Paddle's process groups. Its results are bitwise
equal on all ranks and in every run."""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from hashlib import blake2b
from typing import Any

import numpy as np
import paddle

from ppfleetx.distributed.cpu.arrays import (
    DTYPE_CODES,
    SUM,
    TensorMemory,
    bounds,
    byte_view,
    reduce_in_order,
)
from ppfleetx.distributed.cpu.operation import Operation, Steps
from ppfleetx.distributed.cpu.transport import Connections
from ppfleetx.distributed.cpu.wire import CODES, POINT_TO_POINT, Key, Signature
from ppfleetx.resilience.flight_recorder import OPERATIONS

TensorOrList = paddle.Tensor | list[paddle.Tensor]
# Up to this size, an all-reduce sends whole tensors to all other ranks, which takes one message latency
# instead of two.
_SMALL_BYTES = 1 << 14


class CpuProcessGroup:
    """A process group for CPU tensors, with the methods of Paddle's ``core.ProcessGroup``. Rank arguments are
    ranks within the group. With ``sync_op=False``, an operation is complete only after its task's
    ``wait()``."""

    def __init__(self, mesh: Connections, rank: int, size: int, group_id: int, generation: int) -> None:
        self._mesh, self._rank, self._size = mesh, rank, size
        self.group_id, self._generation = group_id, generation
        self._number = 0
        self._to: dict[int, int] = {}
        self._from: dict[int, int] = {}
        self._coalesced: list[Operation] | None = None
        self._lock = threading.Lock()
        self.counts: dict[str, dict[str, float]] = {}

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """The group's members, as ranks of the job."""
        # Paddle registers the members only after it has created this object.
        group = paddle.distributed.collective._group_map.get(self.group_id)
        ranks = range(self._size) if group is None else group.ranks
        assert len(ranks) == self._size, "Paddle's group and its process group disagree"
        return tuple(ranks)

    @cached_property
    def _key(self) -> int:
        """A 64-bit number that identifies the group in messages. All members compute the same number."""
        identity = f"{self.group_id}:{self._generation}:{self.ranks}"
        return int.from_bytes(blake2b(identity.encode(), digest_size=8).digest())

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size

    def name(self) -> str:
        return "GLOO"

    def all_reduce(self, tensor: paddle.Tensor, op: Any = SUM, sync_op: bool = True) -> Operation:
        memory, kind = TensorMemory(), int(op)
        array = memory.write(tensor)
        self._count("all_reduce", array.nbytes, 2 * (self._size - 1) / self._size * array.nbytes)
        small = array.nbytes <= _SMALL_BYTES

        def steps(number: int, signature: Signature) -> Steps:
            if small:
                theirs = self._scratch(array)
                yield from self._exchange(number, signature, 0, dict.fromkeys(theirs, array), theirs)
                self._reduce_parts(array, theirs, array, kind, memory)
                self._release(theirs)
            else:
                pieces = self._pieces(array)
                mine, others = pieces[self._rank], {m: pieces[m] for m in self._others()}
                yield from self._reduce_scatter_steps(number, signature, pieces, mine, kind, memory)
                yield from self._exchange(number, signature, 1, dict.fromkeys(others, mine), others)

        return self._run("all_reduce", steps, memory, sync=sync_op, nbytes=array.nbytes, is_reduction=True)

    def _gather_all(
        self, outs: Sequence[np.ndarray], mine: np.ndarray, sync: bool, memory: TensorMemory
    ) -> Operation:
        total = sum(out.nbytes for out in outs)
        self._count("all_gather", total, total - mine.nbytes)
        if mine.size and outs[self._rank].ctypes.data != mine.ctypes.data:
            outs[self._rank][:] = mine
        incoming = {m: outs[m] for m in self._others()}
        steps = partial(self._exchange, phase=0, outgoing=dict.fromkeys(incoming, mine), incoming=incoming)
        return self._run("all_gather", steps, memory, sync=sync, nbytes=mine.nbytes)

    def all_gather(self, out: TensorOrList, tensor: TensorOrList, sync_op: bool | None = None) -> Operation:
        """Gather the ``tensor`` of every member into ``out``, in rank order. The arguments are (out, tensor,
        sync_op) or, in Paddle's older interface, (tensor, out)."""
        # Paddle's older interface
        if sync_op is None:
            out, tensor, sync_op = tensor, out, True
        memory = TensorMemory()
        outs = self._parts(memory.write, out)
        return self._gather_all(outs, memory.read(tensor), sync_op, memory)

    def all_gather_into_tensor(
        self, out: paddle.Tensor, tensor: paddle.Tensor, sync_op: bool = True
    ) -> Operation:
        return self.all_gather(out, tensor, sync_op)

    def all_gather_partial(self, out: paddle.Tensor, tensor: paddle.Tensor, num: int, id: int) -> Operation:
        """Gather one part of ``tensor`` from each member into ``out``, in rank order. Each member cuts its
        ``tensor`` into ``num`` equal parts and sends part number ``id``. ``num`` must be the size of the
        group, and ``id`` the member's rank in the group."""
        assert (num, id) == (self._size, self._rank), "one part a member"
        memory = TensorMemory()
        outs, mine = self._equal(memory.write(out)), self._equal(memory.read(tensor))[id]
        return self._gather_all(outs, mine, True, memory)

    def reduce_scatter(
        self, out: paddle.Tensor, tensors: TensorOrList, op: Any = SUM, sync_op: bool = True
    ) -> Operation:
        memory = TensorMemory()
        target = memory.write(out)
        parts = self._parts(memory.read, tensors)
        total = sum(part.nbytes for part in parts)
        self._count("reduce_scatter", total, total - target.nbytes)

        def steps(number: int, signature: Signature) -> Steps:
            return self._reduce_scatter_steps(number, signature, parts, target, int(op), memory)

        size = target.nbytes
        return self._run("reduce_scatter", steps, memory, sync=sync_op, nbytes=size, is_reduction=True)

    reduce_scatter_tensor = reduce_scatter

    def broadcast(self, tensor: paddle.Tensor, src: int, sync_op: bool = True) -> Operation:
        memory = TensorMemory()
        array = memory.write(tensor)
        self._count("broadcast", array.nbytes, (self._size - 1) / self._size * array.nbytes)
        steps = self._steps_of_root(src, dict.fromkeys(self._others(), array), {src: array})
        return self._run("broadcast", steps, memory, sync=sync_op, nbytes=array.nbytes, root=src)

    def _steps_of_root(
        self, root: int, outgoing: dict[int, np.ndarray], incoming: dict[int, np.ndarray]
    ) -> Callable[[int, Signature], Steps]:
        """Return a function that runs this member's part of a collective in which only ``root`` sends. The
        root sends ``outgoing[m]`` to each other member m. The others receive into ``incoming[root]``."""
        if self._rank == root:
            return partial(self._exchange, phase=0, outgoing=outgoing, incoming={})
        return partial(self._exchange, phase=0, outgoing={}, incoming=incoming)

    def reduce(self, tensor: paddle.Tensor, dst: int, op: Any = SUM, sync_op: bool = True) -> Operation:
        """Reduce ``tensor`` over the members with ``op``, in place. Only member ``dst`` gets the result."""
        memory, is_root = TensorMemory(), self._rank == dst
        array = memory.write(tensor) if is_root else memory.read(tensor)
        self._count("reduce", array.nbytes, (self._size - 1) / self._size * array.nbytes)
        pieces = self._pieces(array)

        def steps(number: int, signature: Signature) -> Steps:
            mine = pieces[self._rank]
            total = mine if is_root else np.empty_like(mine)
            yield from self._reduce_scatter_steps(number, signature, pieces, total, int(op), memory)
            incoming = {m: pieces[m] for m in self._others()} if is_root else {}
            yield from self._exchange(number, signature, 1, {} if is_root else {dst: total}, incoming)

        size = array.nbytes
        return self._run("reduce", steps, memory, sync=sync_op, nbytes=size, root=dst, is_reduction=True)

    def scatter(
        self, out: TensorOrList, tensors: TensorOrList, src: int, sync_op: bool | None = None
    ) -> Operation:
        """Send ``tensors[i]`` from member ``src`` to ``out`` of member i. A single tensor is cut into equal
        parts. The arguments are (out, tensors, src, sync_op) or, in Paddle's older interface, (tensors, out,
        src)."""
        # Paddle's older interface
        if sync_op is None:
            out, tensors, sync_op = tensors, out, True
        memory = TensorMemory()
        target, parts = memory.write(out), []
        if self._rank == src:
            parts = self._parts(memory.read, tensors)
        sent = sum(part.nbytes for part in parts) - target.nbytes if parts else 0
        self._count("scatter", target.nbytes * self._size, sent)
        exchange = self._steps_of_root(src, {m: parts[m] for m in self._others() if parts}, {src: target})

        def steps(number: int, signature: Signature) -> Steps:
            yield from exchange(number, signature)
            if parts:  # after sending, because the target may be one of the parts
                target[:] = parts[src]

        return self._run("scatter", steps, memory, sync=sync_op, nbytes=target.nbytes, root=src)

    def scatter_tensor(
        self, out: paddle.Tensor, tensor: paddle.Tensor, src: int, sync_op: bool = True
    ) -> Operation:
        return self.scatter(out, tensor, src, sync_op)

    def gather(
        self,
        tensor: paddle.Tensor,
        outs: list[paddle.Tensor],
        dst: int,
        sync_op: bool = True,
        use_calc_stream: bool = False,
    ) -> Operation:
        memory = TensorMemory()
        mine = memory.read(tensor)
        arrays = [memory.write(t) for t in outs] if self._rank == dst else []
        self._count("gather", mine.nbytes * self._size, 0 if self._rank == dst else mine.nbytes)
        if self._rank == dst:
            arrays[dst][:] = mine
        incoming = {m: arrays[m] for m in self._others() if arrays}
        outgoing = {} if arrays else {dst: mine}
        steps = partial(self._exchange, phase=0, outgoing=outgoing, incoming=incoming)
        sync = sync_op or use_calc_stream
        return self._run("gather", steps, memory, sync=sync, nbytes=mine.nbytes, root=dst)

    def _exchange_all(
        self, outs: Sequence[np.ndarray], parts: Sequence[np.ndarray], sync: bool, memory: TensorMemory
    ) -> Operation:
        total = sum(part.nbytes for part in parts)
        self._count("all_to_all", total, total - parts[self._rank].nbytes)
        outs[self._rank][:] = parts[self._rank]
        outgoing, incoming = ({m: arrays[m] for m in self._others()} for arrays in (parts, outs))
        steps = partial(self._exchange, phase=0, outgoing=outgoing, incoming=incoming)
        # Part sizes may differ between ranks, so the signature has no size; each message has its own.
        return self._run("all_to_all", steps, memory, sync=sync)

    def all_to_all(
        self, outs: list[paddle.Tensor], tensors: list[paddle.Tensor], sync_op: bool = True
    ) -> Operation:
        memory = TensorMemory()
        targets, parts = [memory.write(t) for t in outs], [memory.read(t) for t in tensors]
        return self._exchange_all(targets, parts, sync_op, memory)

    def all_to_all_tensor(self, out: paddle.Tensor, tensor: paddle.Tensor, sync_op: bool = True) -> Operation:
        return self.all_to_all_single(out, tensor, None, None, sync_op)

    def all_to_all_single(
        self,
        out: paddle.Tensor,
        tensor: paddle.Tensor,
        out_sizes: Sequence[int] | None,
        in_sizes: Sequence[int] | None,
        sync_op: bool = True,
    ) -> Operation:
        memory, width = TensorMemory(), math.prod(tensor.shape[1:])
        outs = self._rows(memory.write(out), out_sizes, width)
        parts = self._rows(memory.read(tensor), in_sizes, width)
        return self._exchange_all(outs, parts, sync_op, memory)

    def barrier(self, device_id: int = -1) -> Operation:
        messages = dict.fromkeys(self._others(), np.empty(0, np.uint8))
        steps = partial(self._exchange, phase=0, outgoing=messages, incoming=messages)
        return self._run("barrier", steps, TensorMemory(), sync=True)

    # -- point to point -------------------------------------------------------------------

    def _transfer(
        self, array: np.ndarray, peer: int, *, incoming: bool, sync: bool, memory: TensorMemory
    ) -> Operation:
        """Send ``array`` to member ``peer`` or, if ``incoming``, receive a message from ``peer`` into
        ``array``."""
        # The n-th send to a member is matched with that member's n-th receive from this one.
        counter = self._from if incoming else self._to
        with self._lock:
            number = counter.get(peer, 0)
            counter[peer] = number + 1
        signature = Signature(CODES["send"], memory.code, array.nbytes, -1)
        other = self.ranks[peer]
        # A send with sync_op=False runs in the background; a receive is only posted.
        background = not sync and not incoming and self._coalesced is None
        if background:  # Paddle's pipelines free the tensor at once; on GPUs, the stream keeps it
            array = array.copy()

        def steps() -> Steps:
            if incoming:
                yield self._mesh.inbox.post(
                    [((other, self._key, POINT_TO_POINT, number), signature, byte_view(array))]
                )
            else:
                self._mesh.send(other, self._key, POINT_TO_POINT, number, signature, byte_view(array))
            memory.finish()

        text = f"{'recv' if incoming else 'send'} of group {self.group_id} ({array.nbytes} bytes)"
        operation = self._operation(steps(), text, background=background)
        if self._coalesced is not None:
            self._coalesced.append(operation)
            sync = False
        return self._mesh.launch(operation, sync=sync)

    def send(self, tensor: paddle.Tensor, dst: int, sync_op: bool = True) -> Operation:
        return self.send_partial(tensor, dst, 1, 0, sync_op)

    def recv(self, tensor: paddle.Tensor, src: int, sync_op: bool = True) -> Operation:
        return self.recv_partial(tensor, src, 1, 0, sync_op)

    def send_partial(
        self, tensor: paddle.Tensor, dst: int, num: int, id: int, sync_op: bool = True
    ) -> Operation:
        """Cut ``tensor`` into ``num`` equal parts, and send only part number ``id`` to member ``dst``."""
        memory = TensorMemory()
        array = np.split(memory.read(tensor), num)[id]
        self._count("send", array.nbytes, array.nbytes)
        return self._transfer(array, dst, incoming=False, sync=sync_op, memory=memory)

    def recv_partial(
        self, tensor: paddle.Tensor, src: int, num: int, id: int, sync_op: bool = True
    ) -> Operation:
        """Cut ``tensor`` into ``num`` equal parts, and receive part number ``id`` from member ``src``. The
        other parts stay unchanged."""
        memory = TensorMemory()
        array = np.split(memory.write(tensor), num)[id]
        return self._transfer(array, src, incoming=True, sync=sync_op, memory=memory)

    def _start_coalescing(self) -> None:
        self._coalesced = []

    def _end_coalescing(self, tasks: list[Operation] | None = None) -> None:
        """Wait for the sends and receives since the last call of ``_start_coalescing``. Paddle calls
        ``_start_coalescing`` before a batch of sends and receives, and this method after it."""
        operations, self._coalesced = self._coalesced or [], None
        for operation in operations:
            operation.wait()

    def eager_connect_ring_exchange(self) -> None:
        """Do nothing. Paddle calls this to connect neighbors early, but all members are connected already."""

    # -- building blocks -------------------------------------------------------------------

    def _count(self, name: str, payload: int, sent: float) -> None:
        entry = self.counts.setdefault(name, {"calls": 0, "payload": 0, "sent": 0.0})
        entry["calls"] += 1
        entry["payload"] += payload
        entry["sent"] += sent

    def _run(
        self,
        name: str,
        steps: Callable[[int, Signature], Steps],
        memory: TensorMemory,
        *,
        sync: bool,
        nbytes: int = 0,
        root: int = -1,
        is_reduction: bool = False,
    ) -> Operation:
        """Start the collective that ``steps`` runs, and wait for it if ``sync``. All members must pass the
        same ``name``, ``nbytes`` and ``root``, and tensors of the same type. Otherwise, the collective fails
        with OutOfStepError."""
        with self._lock:
            number = self._number
            self._number += 1
        signature = Signature(CODES[name], memory.code, nbytes, root)
        text = f"{name} of group {self.group_id} ({nbytes} bytes)"
        steps_then_finish = _finished(steps(number, signature), memory)
        operation = self._operation(steps_then_finish, text, background=not sync, is_reduction=is_reduction)
        return self._mesh.launch(operation, sync=sync)

    def _operation(
        self, steps: Steps, text: str, *, background: bool, is_reduction: bool = False
    ) -> Operation:
        mesh = self._mesh
        return Operation(
            mesh.inbox,
            mesh.complete,
            steps,
            text=text,
            group=self._key,
            background=background,
            is_reduction=is_reduction,
        )

    def _exchange(
        self,
        number: int,
        signature: Signature,
        phase: int,
        outgoing: dict[int, np.ndarray],
        incoming: dict[int, np.ndarray],
    ) -> Steps:
        """Send ``outgoing[m]`` to each member m, and wait until each ``incoming[m]`` has arrived."""
        me, size = self._rank, self._size
        wanted: list[tuple[Key, Signature, memoryview]] = [
            ((self.ranks[member], self._key, phase, number), signature, byte_view(array))
            for member, array in incoming.items()
        ]
        receives = self._mesh.inbox.post(wanted)
        order = sorted(outgoing, key=lambda member: (member - me) % size)  # spreads the load of receivers
        for m in order:
            self._mesh.send(self.ranks[m], self._key, phase, number, signature, byte_view(outgoing[m]))
        yield receives

    def _reduce_scatter_steps(
        self,
        number: int,
        signature: Signature,
        pieces: Sequence[np.ndarray],
        out: np.ndarray,
        op: int,
        memory: TensorMemory,
    ) -> Steps:
        """Run a reduce-scatter: send ``pieces[m]`` to each member m, receive this member's piece from every
        other member, and reduce all copies of this piece into ``out``."""
        theirs = self._scratch(out)
        yield from self._exchange(number, signature, 0, {m: pieces[m] for m in self._others()}, theirs)
        self._reduce_parts(pieces[self._rank], theirs, out, op, memory)
        self._release(theirs)

    def _pieces(self, array: np.ndarray) -> list[np.ndarray]:
        return [array[a:b] for a, b in itertools.pairwise(bounds(array.size, self._size))]

    def _others(self) -> list[int]:
        return [member for member in range(self._size) if member != self._rank]

    def _scratch(self, like: np.ndarray) -> dict[int, np.ndarray]:
        return {m: self._mesh.pool.acquire(like.nbytes).view(like.dtype) for m in self._others()}

    def _release(self, scratch: dict[int, np.ndarray]) -> None:
        for array in scratch.values():
            self._mesh.pool.release(array)

    def _reduce_parts(
        self, mine: np.ndarray, theirs: dict[int, np.ndarray], out: np.ndarray, op: int, memory: TensorMemory
    ) -> None:
        parts = [mine if m == self._rank else theirs[m] for m in range(self._size)]
        reduce_in_order(parts, out, op, bfloat16=memory.code == DTYPE_CODES[paddle.bfloat16])

    def _equal(self, array: np.ndarray) -> list[np.ndarray]:
        return np.split(array, self._size)

    def _parts(
        self, open_memory: Callable[[paddle.Tensor], np.ndarray], tensors: TensorOrList
    ) -> list[np.ndarray]:
        """Return one array for each member, in rank order. If ``tensors`` is a list, these are the memory of
        each tensor; otherwise, they are equal parts of the memory of the single tensor. ``open_memory`` is
        the method ``read`` or ``write`` of a :class:`TensorMemory`."""
        if isinstance(tensors, list | tuple):
            return [open_memory(tensor) for tensor in tensors]
        return self._equal(open_memory(tensors))

    def _rows(self, array: np.ndarray, sizes: Sequence[int] | None, width: int) -> list[np.ndarray]:
        if not sizes:
            return self._equal(array)
        return np.split(array, np.cumsum(np.asarray(sizes) * width)[:-1])


def _finished(steps: Steps, memory: TensorMemory) -> Steps:
    yield from steps
    memory.finish()


def _add_method_aliases() -> None:
    """Add the other method names that Paddle uses: ``allreduce``, and names that end in
    ``_on_calc_stream``."""
    ending = "_on_calc_stream"
    for name in (one for one in OPERATIONS if one.endswith(ending)):
        method = getattr(CpuProcessGroup, name.removesuffix(ending), None)
        if method is not None:
            setattr(CpuProcessGroup, name, method)
    CpuProcessGroup.allreduce = CpuProcessGroup.all_reduce


_add_method_aliases()
