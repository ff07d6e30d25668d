"""Checks of ``ppfleetx doctor`` on the machine, the installed Paddle and the environment variables."""

from __future__ import annotations

import os
import platform
import re
import resource
import shutil
import sys
from collections.abc import Iterator

from ppfleetx import __version__
from ppfleetx.distributed.device import count, is_built_for_gpus, is_card, kind_of, visible_cards_variable
from ppfleetx.doctor.results import Row, Target, fail, ok, warn
from ppfleetx.utils.installed import not_installed, version_of
from ppfleetx.utils.machine import available_bytes, available_cpus, read_cpuinfo
from ppfleetx.utils.process_env import import_paddle, prepare_process

PADDLE = "3.3."
"""Prefix of the Paddle versions that ppfleetx supports."""
_PREFIXES = (
    *("NCCL_", "HCCL_", "BKCL_", "GLOO_", "ASCEND_RT_", "NPU_", "XPU", "CUDA_", "NVIDIA_"),
    *("FLAGS_", "OMP_", "MKL_", "PADDLE_", "PPFLEETX_", "MASTER_"),
)
_SET_BY_LAUNCHER = (
    *(f"PADDLE_{name}" for name in ("AUTO", "BACKUP", "CURRENT", "DISTRI", "GLOBAL", "LOCAL", "LOG")),
    *(f"PADDLE_{name}" for name in ("MASTER", "NNODES", "RANK", "TRAINER")),
    *("PPFLEETX_DOCTOR", "PPFLEETX_LAUNCHER"),
)
_SHARED_MEMORY = "/dev/shm"  # noqa: S108
_LEAST_SHARED_BYTES, _SHARED_BYTES = 16 << 20, 1 << 30  # NCCL needs a few MiB per pair of cards
_LEAST_FILES, _FILES = 256, 4096
_SECRET = re.compile(r"TOKEN|SECRET|PASSWORD|CREDENTIAL", re.IGNORECASE)


def versions(target: Target) -> Iterator[Row]:
    yield ok("python", f"{platform.python_version()} ({sys.executable})")
    yield ok("ppfleetx", f"{__version__} ({os.path.dirname(os.path.dirname(__file__))})")  # noqa: PTH120
    yield _paddle_version()


def _paddle_version() -> Row:
    found = {name: version_of(name) for name in ("paddlepaddle-gpu", "paddlepaddle")}
    there = {name: version for name, version in found.items() if version}
    text = ", ".join(f"{name} {version}" for name, version in there.items())
    if not there:
        return fail("paddle", "not installed", str(not_installed(ModuleNotFoundError(name="paddle"))))
    if len(there) == 2:
        return fail(
            "paddle",
            f"{text}: both builds are installed, and one overwrites the other's files",
            "pip uninstall paddlepaddle paddlepaddle-gpu, then install the one you want",
        )
    version, fix = next(iter(there.values())), f"ppfleetx is tested with Paddle {PADDLE}x"
    if not version.startswith(PADDLE):
        is_older = [int(part) for part in re.findall(r"\d+", version)[:2]] < [3, 3] and version != "0.0.0"
        return (fail if is_older else warn)("paddle", text, f"{fix}: install that")
    return ok("paddle", text)


def machine(target: Target) -> Iterator[Row]:
    lines = (line for line in read_cpuinfo().splitlines() if line.startswith("model name"))
    model = next((line.partition(":")[2].strip() for line in lines), platform.machine())
    cpus, free = available_cpus(), available_bytes()
    memory = "" if free is None else f", {free / 2**30:.1f} GiB of memory free"
    yield ok("host", f"{platform.node()}, {platform.system()} {platform.release()}")
    if target.local_size > cpus:
        yield warn(
            "processor",
            f"{model}, {cpus} CPUs for {target.local_size} processes{memory}",
            "processes that share a CPU wait for each other: start fewer on this machine",
        )
    else:
        yield ok("processor", f"{model}, {cpus} CPUs{memory}")


def limits(target: Target) -> Iterator[Row]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield open_files_row(soft, hard)
    yield _shared_memory(target)


def open_files_row(soft: int, hard: int) -> Row:
    """Return the report row about the limits on open files (``ulimit -n``). A negative value means that there
    is no limit."""
    if soft < 0 or soft >= _FILES:
        return ok("open files", f"at most {soft:,}" if soft >= 0 else "no limit")
    fix = f"ulimit -n {max(_FILES, min(hard, 65536) if hard > 0 else 65536)} before the job starts"
    if 0 <= hard < _FILES:
        fix += (
            "; the hard limit is lower: raise it in /etc/security/limits.conf, with LimitNOFILE of the "
            "service, or with docker run --ulimit nofile=N"
        )
    text = f"at most {soft:,} (connections, corpora and logs are files too)"
    return (fail if soft < _LEAST_FILES else warn)("open files", text, fix)


def _shared_memory(target: Target) -> Row:
    fix = "docker run --shm-size=8g, or mount -o remount,size=8g /dev/shm; remove files that are left in it"
    try:
        total, _, free = shutil.disk_usage(_SHARED_MEMORY)
    except FileNotFoundError:
        total = free = 0
    text = f"{free / 2**20:.0f} of {total / 2**20:.0f} MiB free in {_SHARED_MEMORY}"
    cards = target.local_size if is_card(target.device) else 1
    if cards > 1 and free < _LEAST_SHARED_BYTES * cards:
        return fail("shared memory", f"{text}, through which {cards} cards exchange data", fix)
    if free < (_SHARED_BYTES if cards > 1 else _LEAST_SHARED_BYTES):
        return warn("shared memory", text, fix)
    return ok("shared memory", text)


def variables(target: Target) -> Iterator[Row]:
    there = {
        name: "(not shown)" if _SECRET.search(name) else value
        for name, value in sorted(target.environ.items())
        if name.startswith(_PREFIXES) and not name.startswith(_SET_BY_LAUNCHER)
    }
    text = " ".join(f"{name}={value}" for name, value in there.items())
    yield ok("variables", text or "none of NCCL, CUDA, Paddle or ppfleetx is set")


def paddle_loads(target: Target) -> Iterator[Row]:
    """Import Paddle, and report its version, its build and the settings of this process, such as the number
    of threads."""
    said = prepare_process(device=target.device)
    try:
        import_paddle()
        import paddle
    except ImportError as error:
        yield fail(
            "import paddle",
            f"{type(error).__name__}: {error}",
            "a library that Paddle needs is missing or of another version; for GPUs: the CUDA and cuDNN it "
            "was built for",
        )
        return
    build = "for GPUs" if is_built_for_gpus() else "for CPUs"
    yield ok("import paddle", f"{paddle.version.full_version} {build}, commit {paddle.version.commit[:12]}")
    if is_card(target.device) and not count(kind_of(target.device)):
        yield fail(
            "visible cards",
            f"Paddle sees no {kind_of(target.device)}",
            "load the driver, give the container its cards, and look at "
            f"{visible_cards_variable(target.device)}; on a CPU: -o Global.device=cpu",
        )
        return
    paddle.set_device(target.device)
    yield ok("settings", said)
