"""What the system allows this process: open files, memory, sizes of files, time, shared memory."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass

from ppfleetx.config.counts import counted
from ppfleetx.distributed.device import is_card, is_gpu
from ppfleetx.doctor.case import Case
from ppfleetx.doctor.rows import Row, Status, fail, ok, skipped, warn
from ppfleetx.doctor.storage import words

_SHARED_MEMORY, _RDMA = "/dev/shm", "/sys/class/infiniband"  # noqa: S108
_LEAST_SHARED_BYTES, _SHARED_BYTES = 16 << 20, 1 << 30  # NCCL takes some MiB for each pair of cards


@dataclass(frozen=True)
class Limit:
    """One line of ``ulimit -a``.

    Attributes:
        title: of the row.
        constant: in the module ``resource``.
        option: of ``ulimit``.
        fails: below it a job does not run.
        warns: below it, it may not.
        what: it is about.
        unit: bytes of one of the option's numbers; 0: they are no bytes.
    """

    title: str
    constant: str
    option: str
    fails: int
    warns: int
    what: str
    unit: int = 0


_ALL = sys.maxsize  # whatever the limit is
LIMITS = (
    Limit("open files", "RLIMIT_NOFILE", "n", 256, 4096, "connections, corpora and logs are files too"),
    Limit("address space", "RLIMIT_AS", "v", 8 << 30, _ALL, "Paddle reserves more than it uses", 1024),
    Limit("data size", "RLIMIT_DATA", "d", 8 << 30, _ALL, "weights and activations", 1024),
    Limit("file size", "RLIMIT_FSIZE", "f", 1 << 30, _ALL, "checkpoints are large files", 512),
    Limit("processor time", "RLIMIT_CPU", "t", _ALL, _ALL, "seconds, and then the process is killed"),
    Limit("processes", "RLIMIT_NPROC", "u", 256, 2048, "each thread counts"),
)


def limits(case: Case) -> Iterator[Row]:
    """The limits of this process, and the shared memory of its machine."""
    if not sys.platform.startswith("linux"):
        yield skipped("open files", f"limits are read on Linux alone, this is {sys.platform}")
        return
    import resource

    for limit in LIMITS:
        soft, hard = resource.getrlimit(getattr(resource, limit.constant))
        is_shown = limit.title == "open files" or not _is_unlimited(soft)
        if is_shown and (limit.title != "processes" or os.geteuid() != 0):  # root has as many as it wants
            yield limit_row(limit, soft, hard, is_gpu=is_gpu(case.device))
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if os.path.isdir(_RDMA) and os.listdir(_RDMA) and not _is_unlimited(soft):  # noqa: PTH112, PTH208
        yield locked_row(soft, case)
    yield _shared_memory(case)


def _is_unlimited(number: int) -> bool:
    return number < 0 or number >= _ALL


def limit_row(limit: Limit, soft: int, hard: int, *, is_gpu: bool = False) -> Row:
    """What to say of a limit.

    Args:
        soft, hard: as ``getrlimit`` gives them; below 0: there is none.
        is_gpu: CUDA reserves the address space of all cards.
    """
    if _is_unlimited(soft):
        return ok(limit.title, "no limit")
    shown = words(soft) if limit.unit else f"{soft:,}"
    text = f"at most {shown} ({limit.what})"
    if soft >= limit.warns:
        return ok(limit.title, f"at most {shown}")
    enough = limit.warns if limit.warns < _ALL else -1
    wish = "unlimited" if enough < 0 else str(max(enough, min(hard, 65536) if hard > 0 else 65536))
    cure = f"ulimit -{limit.option} {wish} before the job starts"
    if hard >= 0 and (enough < 0 or hard < enough):
        cure += (
            "; the hard limit is lower: /etc/security/limits.conf, Limit… of the service, or docker run "
            f"--ulimit {limit.constant.removeprefix('RLIMIT_').lower()}=N raise it"
        )
    is_too_low = soft < limit.fails or (is_gpu and limit.constant == "RLIMIT_AS")
    return Row(limit.title, Status.FAIL if is_too_low else Status.WARN, text, cure)


def locked_row(soft: int, case: Case) -> Row:
    """What to say of a limit of locked memory on a machine with InfiniBand: a failure where a job uses it."""
    is_needed = is_card(case.device) and case.world_size > case.local_size
    text = f"at most {words(soft)}: InfiniBand cannot register its buffers"
    cure = "ulimit -l unlimited before the job starts, or docker run --ulimit memlock=-1"
    return (fail if is_needed else warn)("locked memory", text, cure)


def _shared_memory(case: Case) -> Row:
    cure = "docker run --shm-size=8g, or mount -o remount,size=8g /dev/shm; remove files that are left in it"
    is_needed = is_card(case.device) and case.local_size > 1
    if not os.path.isdir(_SHARED_MEMORY):  # noqa: PTH112
        text = f"there is no {_SHARED_MEMORY}"
        return (fail if is_needed else warn)("shared memory", text, f"mount -t tmpfs none {_SHARED_MEMORY}")
    total, _, free = shutil.disk_usage(_SHARED_MEMORY)
    text = f"{free / 2**20:.0f} of {total / 2**20:.0f} MiB free in {_SHARED_MEMORY}"
    if is_needed and free < _SHARED_BYTES:
        cards = counted(case.local_size, "card")
        text += f", which the {cards} of this machine exchange data through"
        return (fail if free < _LEAST_SHARED_BYTES * case.local_size else warn)("shared memory", text, cure)
    if free < _LEAST_SHARED_BYTES:
        return warn("shared memory", text, cure)
    return ok("shared memory", text)
