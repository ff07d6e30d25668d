"""A CPU process group with Paddle's interface: collectives, and messages between two ranks.

Reductions add in rank order, 16-bit floats in float32. Each element is reduced by one rank, or by all ranks
in the same way, so all ranks get the same bits in every run.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import paddle

from ppfleetx.distributed.cpu.arrays import DTYPE_CODES, SUM, TensorMemory, bounds, byte_view
from ppfleetx.distributed.cpu.member import CODES, Member
from ppfleetx.distributed.cpu.operation import Operation, Steps
from ppfleetx.distributed.cpu.wire import POINT_TO_POINT, Signature
from ppfleetx.resilience.flight_recorder import OPERATIONS

TensorOrList = paddle.Tensor | list[paddle.Tensor]
# Up to this size every rank sends everything to all others, which takes one message time instead of two.
_SMALL_BYTES = 1 << 14


class CpuProcessGroup(Member):
    """The methods of Paddle's ``core.ProcessGroup`` on CPU tensors.

    Ranks in arguments are ranks within the group. Methods return a task; with ``sync_op=False`` it is
    complete only after its ``wait()``, even for a send.
    """

    def all_reduce(self, tensor: paddle.Tensor, op: Any = SUM, sync_op: bool = True) -> Operation:
        memory = TensorMemory()
        array, code, kind = memory.write(tensor), DTYPE_CODES[tensor.dtype], int(op)
        self._count("all_reduce", array.nbytes, 2 * (self._size - 1) / self._size * array.nbytes)
        small = array.nbytes <= _SMALL_BYTES

        def steps(number: int, signature: Signature) -> Steps:
            if small:
                theirs = self._scratch(array, self._others())
                yield from self._exchange(number, signature, 0, dict.fromkeys(theirs, array), theirs)
                self._reduce_parts(array, theirs, array, kind, code)
            else:
                edges = bounds(array.size, self._size)
                pieces = [array[a:b] for a, b in itertools.pairwise(edges)]
                mine = pieces[self._rank]
                others = {m: pieces[m] for m in self._others()}
                theirs = self._scratch(mine, self._others())
                yield from self._exchange(number, signature, 0, others, theirs)
                self._reduce_parts(mine, theirs, mine, kind, code)
                yield from self._exchange(number, signature, 1, dict.fromkeys(others, mine), others)
            self._release(theirs)
            memory.finish()

        return self._run(
            "all_reduce", steps, sync=sync_op, dtype=code, nbytes=array.nbytes, takes_memory=True
        )

    def _gather_all(
        self, outs: Sequence[np.ndarray], mine: np.ndarray, code: int, sync: bool, memory: TensorMemory
    ) -> Operation:
        total = sum(out.nbytes for out in outs)
        self._count("all_gather", total, total - mine.nbytes)

        def steps(number: int, signature: Signature) -> Steps:
            incoming = {m: outs[m] for m in self._others()}
            yield from self._exchange(number, signature, 0, dict.fromkeys(incoming, mine), incoming)
            if mine.size and outs[self._rank].ctypes.data != mine.ctypes.data:
                outs[self._rank][:] = mine
            memory.finish()

        return self._run("all_gather", steps, sync=sync, dtype=code, nbytes=mine.nbytes)

    def all_gather(self, out: TensorOrList, tensor: TensorOrList, sync_op: bool | None = None) -> Operation:
        """Gather ``tensor`` of all members into ``out``. Without ``sync_op`` the two arguments are swapped,
        as in Paddle's older signature."""
        if sync_op is None:
            out, tensor, sync_op = tensor, out, True
        memory = TensorMemory()
        outs = (
            [memory.write(t) for t in out]
            if isinstance(out, list | tuple)
            else self._equal(memory.write(out))
        )
        return self._gather_all(outs, memory.read(tensor), DTYPE_CODES[tensor.dtype], sync_op, memory)

    def all_gather_into_tensor(
        self, out: paddle.Tensor, tensor: paddle.Tensor, sync_op: bool = True
    ) -> Operation:
        return self.all_gather(out, tensor, sync_op)

    def all_gather_partial(self, out: paddle.Tensor, tensor: paddle.Tensor, num: int, id: int) -> Operation:
        """Gather the parts of ``tensor``, the i-th of ``num`` from member i, into ``out`` on each member."""
        assert (num, id) == (self._size, self._rank), "one part a member"
        memory = TensorMemory()
        outs, mine = self._equal(memory.write(out)), self._equal(memory.read(tensor))[id]
        return self._gather_all(outs, mine, DTYPE_CODES[tensor.dtype], True, memory)

    def reduce_scatter(
        self, out: paddle.Tensor, tensors: TensorOrList, op: Any = SUM, sync_op: bool = True
    ) -> Operation:
        memory, code = TensorMemory(), DTYPE_CODES[out.dtype]
        target = memory.write(out)
        parts = (
            [memory.read(t) for t in tensors]
            if isinstance(tensors, list | tuple)
            else self._equal(memory.read(tensors))
        )
        total = sum(part.nbytes for part in parts)
        self._count("reduce_scatter", total, total - target.nbytes)

        def steps(number: int, signature: Signature) -> Steps:
            outgoing = {m: parts[m] for m in self._others()}
            theirs = self._scratch(target, self._others())
            yield from self._exchange(number, signature, 0, outgoing, theirs)
            self._reduce_parts(parts[self._rank], theirs, target, int(op), code)
            self._release(theirs)
            memory.finish()

        return self._run(
            "reduce_scatter", steps, sync=sync_op, dtype=code, nbytes=target.nbytes, takes_memory=True
        )

    def reduce_scatter_tensor(
        self, out: paddle.Tensor, tensor: paddle.Tensor, op: Any = SUM, sync_op: bool = True
    ) -> Operation:
        return self.reduce_scatter(out, tensor, op, sync_op)

    def broadcast(self, tensor: paddle.Tensor, src: int, sync_op: bool = True) -> Operation:
        memory, code = TensorMemory(), DTYPE_CODES[tensor.dtype]
        array = memory.write(tensor)
        self._count("broadcast", array.nbytes, (self._size - 1) / self._size * array.nbytes)

        def steps(number: int, signature: Signature) -> Steps:
            if self._rank == src:
                yield from self._exchange(number, signature, 0, dict.fromkeys(self._others(), array), {})
            else:
                yield from self._exchange(number, signature, 0, {}, {src: array})
            memory.finish()

        return self._run("broadcast", steps, sync=sync_op, dtype=code, nbytes=array.nbytes, root=src)

    def reduce(self, tensor: paddle.Tensor, dst: int, op: Any = SUM, sync_op: bool = True) -> Operation:
        """Sum into member ``dst``. The other members are done when they have sent their parts."""
        memory, code = TensorMemory(), DTYPE_CODES[tensor.dtype]
        array = memory.write(tensor)
        self._count("reduce", array.nbytes, (self._size - 1) / self._size * array.nbytes)

        def add_up(number: int, signature: Signature) -> Steps:
            theirs = self._scratch(array, self._others())
            yield from self._exchange(number, signature, 0, {}, theirs)
            self._reduce_parts(array, theirs, array, int(op), code)
            self._release(theirs)
            self._announce_end(number, signature)
            memory.finish()

        def send(number: int, signature: Signature, first: list[tuple[int, Signature]]) -> Steps:
            yield self._ends(dst, first)
            yield from self._exchange(number, signature, 0, {dst: array}, {})
            memory.finish()

        def steps(number: int, signature: Signature) -> Steps:
            if self._rank == dst:
                return add_up(number, signature)
            return send(number, signature, self._window.admit(dst, number, signature))

        return self._run(
            "reduce",
            steps,
            sync=sync_op,
            dtype=code,
            nbytes=array.nbytes,
            root=dst,
            takes_memory=self._rank == dst,
        )

    def scatter(
        self, out: TensorOrList, tensors: TensorOrList, src: int, sync_op: bool | None = None
    ) -> Operation:
        """Scatter from a member. Without ``sync_op``, the signature is Paddle's older ``scatter(tensor, out,
        src)``.
        """
        if sync_op is None:
            out, tensors, sync_op = tensors, out, True
        memory, code = TensorMemory(), DTYPE_CODES[out.dtype]
        target, parts = memory.write(out), []
        if self._rank == src:
            several = isinstance(tensors, list | tuple)
            parts = [memory.read(t) for t in tensors] if several else self._equal(memory.read(tensors))
        sent = sum(part.nbytes for part in parts) - target.nbytes if parts else 0
        self._count("scatter", target.nbytes * self._size, sent)

        def steps(number: int, signature: Signature) -> Steps:
            if self._rank == src:
                yield from self._exchange(number, signature, 0, {m: parts[m] for m in self._others()}, {})
                target[:] = parts[src]
            else:
                yield from self._exchange(number, signature, 0, {}, {src: target})
            memory.finish()

        return self._run("scatter", steps, sync=sync_op, dtype=code, nbytes=target.nbytes, root=src)

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
        memory, code = TensorMemory(), DTYPE_CODES[tensor.dtype]
        mine = memory.read(tensor)
        arrays = [memory.write(t) for t in outs] if self._rank == dst else []
        self._count("gather", mine.nbytes * self._size, 0 if self._rank == dst else mine.nbytes)

        def steps(number: int, signature: Signature) -> Steps:
            if self._rank == dst:
                yield from self._exchange(number, signature, 0, {}, {m: arrays[m] for m in self._others()})
                arrays[dst][:] = mine
            else:
                yield from self._exchange(number, signature, 0, {dst: mine}, {})
            memory.finish()

        sync = sync_op or use_calc_stream
        return self._run("gather", steps, sync=sync, dtype=code, nbytes=mine.nbytes, root=dst)

    def _exchange_all(
        self,
        outs: Sequence[np.ndarray],
        parts: Sequence[np.ndarray],
        code: int,
        sync: bool,
        memory: TensorMemory,
    ) -> Operation:
        total = sum(part.nbytes for part in parts)
        self._count("all_to_all", total, total - parts[self._rank].nbytes)

        def steps(number: int, signature: Signature) -> Steps:
            others = self._others()
            outgoing, incoming = {m: parts[m] for m in others}, {m: outs[m] for m in others}
            yield from self._exchange(number, signature, 0, outgoing, incoming)
            outs[self._rank][:] = parts[self._rank]
            memory.finish()

        # Parts may differ in size between ranks, so the signature has no size; each message carries its own.
        return self._run("all_to_all", steps, sync=sync, dtype=code)

    def all_to_all(
        self, outs: list[paddle.Tensor], tensors: list[paddle.Tensor], sync_op: bool = True
    ) -> Operation:
        memory, code = TensorMemory(), DTYPE_CODES[tensors[0].dtype]
        targets, parts = [memory.write(t) for t in outs], [memory.read(t) for t in tensors]
        return self._exchange_all(targets, parts, code, sync_op, memory)

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
        return self._exchange_all(outs, parts, DTYPE_CODES[tensor.dtype], sync_op, memory)

    def barrier(self, device_id: int = -1) -> Operation:
        nothing = np.empty(0, np.uint8)

        def steps(number: int, signature: Signature) -> Steps:
            messages = dict.fromkeys(self._others(), nothing)
            yield from self._exchange(number, signature, 0, messages, messages)

        return self._run("barrier", steps, sync=True)

    # -- point to point -------------------------------------------------------------------

    def _transfer(
        self, array: np.ndarray, code: int, peer: int, *, incoming: bool, sync: bool, memory: TensorMemory
    ) -> Operation:
        """Transfer one message between two members: the n-th send is matched with the n-th receive."""
        counter = self._from if incoming else self._to
        with self._lock:
            number = counter.get(peer, 0)
            counter[peer] = number + 1
        signature = Signature(CODES["send"], code, array.nbytes, -1)
        other = self.ranks[peer]
        # A send with sync_op=False runs in the background; a receive only needs to be posted.
        background = not sync and not incoming and self._coalesced is None
        if background:  # Paddle's pipelines free the tensor at once; on GPUs the stream keeps its memory
            array = array.copy()

        def steps() -> Steps:
            if incoming:
                yield self._mesh.inbox.post(
                    [((other, self._key, POINT_TO_POINT, number), signature, byte_view(array))]
                )
            else:
                wait_until_read = self._mesh.send(
                    other, self._key, POINT_TO_POINT, number, signature, byte_view(array)
                )
                if wait_until_read is not None:
                    wait_until_read()
            memory.finish()

        text = f"{'recv' if incoming else 'send'} of group {self.group_id} ({array.nbytes} bytes)"
        operation = self._operation(steps(), text, -1, signature, background=background)
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
        """Send the ``id``-th of ``num`` equal parts of ``tensor``."""
        memory = TensorMemory()
        array = np.split(memory.read(tensor), num)[id]
        self._count("send", array.nbytes, array.nbytes)
        code = DTYPE_CODES[tensor.dtype]
        return self._transfer(array, code, dst, incoming=False, sync=sync_op, memory=memory)

    def recv_partial(
        self, tensor: paddle.Tensor, src: int, num: int, id: int, sync_op: bool = True
    ) -> Operation:
        """Fill the ``id``-th of ``num`` equal parts of ``tensor``."""
        memory = TensorMemory()
        array = np.split(memory.write(tensor), num)[id]
        code = DTYPE_CODES[tensor.dtype]
        return self._transfer(array, code, src, incoming=True, sync=sync_op, memory=memory)

    def _start_coalescing(self) -> None:
        self._coalesced = []

    def _end_coalescing(self, tasks: list[Operation] | None = None) -> None:
        """Complete the batch. Until now its receives were only posted, so no order of calls can deadlock."""
        operations, self._coalesced = self._coalesced or [], None
        for operation in operations:
            operation.wait()

    def eager_connect(self) -> None:
        """Nothing to do: the connections exist already."""

    def eager_connect_ring_exchange(self) -> None:
        """Nothing to do: the connections exist already."""


def _add_paddles_spellings() -> None:
    """Add Paddle's other names. ``*_on_calc_stream`` does the same as the plain method, because a CPU has one
    stream.
    """
    ending = "_on_calc_stream"
    for name in (one for one in OPERATIONS if one.endswith(ending)):
        method = getattr(CpuProcessGroup, name.removesuffix(ending), None)
        if method is not None:
            setattr(CpuProcessGroup, name, method)
    CpuProcessGroup.allreduce = CpuProcessGroup.all_reduce


_add_paddles_spellings()
