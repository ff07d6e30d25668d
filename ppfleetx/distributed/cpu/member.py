"""The building blocks of collectives: a rank as a member of a CPU process group."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import cached_property
from hashlib import blake2b

import numpy as np
import paddle

from ppfleetx.distributed.cpu.arrays import DTYPE_CODES, byte_view, reduce_in_order
from ppfleetx.distributed.cpu.inbox import BufferPool, Receive, Window
from ppfleetx.distributed.cpu.operation import Operation, Steps
from ppfleetx.distributed.cpu.transport import Mesh
from ppfleetx.distributed.cpu.wire import ENDED, OPERATIONS, Key, Signature

CODES = {name: code for code, name in enumerate(OPERATIONS)}
_BYTES = 255  # the dtype code of operations without one (barrier)


class Member:
    """This rank as a member of one group."""

    def __init__(self, mesh: Mesh, rank: int, size: int, group_id: int, generation: int) -> None:
        self._mesh, self._rank, self._size = mesh, rank, size
        self.group_id, self._generation = group_id, generation
        self._number = 0
        self._to: dict[int, int] = {}
        self._from: dict[int, int] = {}
        self._window = Window()
        self._coalesced: list[Operation] | None = None
        self._lock = threading.Lock()
        self.counts: dict[str, dict[str, float]] = {}

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """The members' ranks in the job. Only Paddle's Group object knows them, and it is created after this
        object.
        """
        group = paddle.distributed.collective._group_map.get(self.group_id)
        ranks = range(self._size) if group is None else group.ranks
        assert len(ranks) == self._size, "Paddle's group and its process group disagree"
        return tuple(ranks)

    @cached_property
    def _key(self) -> int:
        """A 64-bit number that identifies the group in the job, the same on all members."""
        identity = f"{self.group_id}:{self._generation}:{self.ranks}"
        return int.from_bytes(blake2b(identity.encode(), digest_size=8).digest())

    @property
    def pool(self) -> BufferPool:
        return self._mesh.pool

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size

    def name(self) -> str:
        return "GLOO"

    def _count(self, name: str, payload: int, sent: float) -> None:
        entry = self.counts.setdefault(name, {"calls": 0, "payload": 0, "sent": 0.0})
        entry["calls"] += 1
        entry["payload"] += payload
        entry["sent"] += sent

    def _run(
        self,
        name: str,
        steps: Callable[[int, Signature], Steps],
        *,
        sync: bool,
        dtype: int = _BYTES,
        nbytes: int = 0,
        root: int = -1,
        takes_memory: bool = False,
    ) -> Operation:
        """Start a collective. All members must pass the same ``dtype``, ``nbytes`` and ``root``."""
        with self._lock:
            number = self._number
            self._number += 1
        signature = Signature(CODES[name], dtype, nbytes, root)
        text = f"{name} of group {self.group_id} ({nbytes} bytes)"
        operation = self._operation(
            steps(number, signature),
            text,
            number,
            signature,
            background=not sync,
            takes_memory=takes_memory,
        )
        return self._mesh.launch(operation, sync=sync)

    def _operation(
        self,
        steps: Steps,
        text: str,
        number: int,
        signature: Signature,
        *,
        background: bool = False,
        takes_memory: bool = False,
    ) -> Operation:
        mesh = self._mesh
        return Operation(
            mesh.inbox,
            mesh.complete,
            steps,
            text=text,
            group=self._key,
            number=number,
            signature=signature,
            background=background,
            takes_memory=takes_memory,
        )

    def _exchange(
        self,
        number: int,
        signature: Signature,
        phase: int,
        outgoing: dict[int, np.ndarray],
        incoming: dict[int, np.ndarray],
    ) -> Steps:
        """Send ``outgoing[member]`` and receive ``incoming[member]`` for all members at once."""
        me, size = self._rank, self._size
        wanted: list[tuple[Key, Signature, memoryview]] = [
            ((self.ranks[member], self._key, phase, number), signature, byte_view(array))
            for member, array in incoming.items()
        ]
        receives = self._mesh.inbox.post(wanted)
        order = sorted(outgoing, key=lambda member: (member - me) % size)  # not all start with member 0
        unread = [
            self._mesh.send(self.ranks[m], self._key, phase, number, signature, byte_view(outgoing[m]))
            for m in order
        ]
        for wait_until_read in unread:
            if wait_until_read is not None:
                wait_until_read()
        yield receives

    def _announce_end(self, number: int, signature: Signature) -> None:
        """Tell the members that sent data for a sum that the sum has ended."""
        for member in self._others():
            self._mesh.notify(self.ranks[member], self._key, ENDED, number, signature)

    def _ends(self, owner: int, sums: Sequence[tuple[int, Signature]]) -> list[Receive]:
        """Receives for the notifications by ``owner`` that these sums have ended."""
        return self._mesh.inbox.post(
            ((self.ranks[owner], self._key, ENDED, number), signature, memoryview(bytearray()))
            for number, signature in sums
        )

    def _others(self) -> list[int]:
        return [member for member in range(self._size) if member != self._rank]

    def _scratch(self, like: np.ndarray, members: Sequence[int]) -> dict[int, np.ndarray]:
        return {m: self.pool.acquire(like.nbytes).view(like.dtype) for m in members}

    def _release(self, scratch: dict[int, np.ndarray]) -> None:
        for array in scratch.values():
            self.pool.release(array)

    def _reduce_parts(
        self, mine: np.ndarray, theirs: dict[int, np.ndarray], out: np.ndarray, op: int, dtype: int
    ) -> None:
        parts = [mine if m == self._rank else theirs[m] for m in range(self._size)]
        reduce_in_order(parts, out, op, bfloat16=dtype == DTYPE_CODES[paddle.bfloat16])

    def _equal(self, array: np.ndarray) -> list[np.ndarray]:
        return np.split(array, self._size)

    def _rows(self, array: np.ndarray, sizes: Sequence[int] | None, width: int) -> list[np.ndarray]:
        """Split ``array`` into ``sizes`` rows of ``width`` elements; without ``sizes``, into equal parts."""
        if not sizes:
            return self._equal(array)
        return np.split(array, np.cumsum(np.asarray(sizes) * width)[:-1])
