"""The machine, the libraries and the variables of this process."""

from __future__ import annotations

import os
import platform
import re
import sys
from collections.abc import Iterator

from ppfleetx import __version__
from ppfleetx.distributed.device import count, is_built_for_gpus, is_card, kind_of, visible_cards
from ppfleetx.doctor.case import Case
from ppfleetx.doctor.rows import Row, fail, ok, skipped, warn
from ppfleetx.utils.cpu import read_cpuinfo
from ppfleetx.utils.installed import not_installed, version_of
from ppfleetx.utils.memory import available_bytes
from ppfleetx.utils.process_env import available_cpus, import_paddle, prepare_process

PADDLE = "3.3."
"""Beginning of the versions of Paddle that ppfleetx is made for."""
_NUMPY_BELOW = (2, 4)
_PREFIXES = (
    "NCCL_",
    "HCCL_",
    "BKCL_",
    "ASCEND_RT_",
    "NPU_",
    "XPU",
    "GLOO_",
    "FLAGS_",
    "CUDA_",
    "NVIDIA_",
    "OMP_",
    "MKL_",
    "PADDLE_",
    "PPFLEETX_",
    "MASTER_",
)
_OF_LAUNCHER = (
    *(f"PADDLE_{name}" for name in ("AUTO", "BACKUP", "CURRENT", "DISTRI", "GLOBAL", "LOCAL", "LOG")),
    *(f"PADDLE_{name}" for name in ("MASTER", "NNODES", "RANK", "TRAINER")),
    *("PPFLEETX_DOCTOR", "PPFLEETX_LAUNCHER"),
)
_SECRET = re.compile(r"TOKEN|SECRET|PASSWORD|CREDENTIAL", re.IGNORECASE)


def versions(case: Case) -> Iterator[Row]:
    """Python, ppfleetx, Paddle's distribution, NumPy."""
    yield ok("python", f"{platform.python_version()} ({sys.executable})")
    yield ok("ppfleetx", f"{__version__} ({os.path.dirname(os.path.dirname(__file__))})")  # noqa: PTH120
    yield _paddle_version()
    yield _numpy_version()


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
    version, cure = next(iter(there.values())), f"ppfleetx is made for, and tested with, Paddle {PADDLE}x"
    if not version.startswith(PADDLE):
        is_older = [int(part) for part in re.findall(r"\d+", version)[:2]] < [3, 3] and version != "0.0.0"
        return (fail if is_older else warn)("paddle", text, f"{cure}: install that")
    return ok("paddle", text)


def _numpy_version() -> Row:
    version = version_of("numpy")
    if not version:
        return fail("numpy", "not installed", "run `pip install 'numpy>=1.26,<2.4'`")
    if tuple(int(part) for part in version.split(".")[:2]) >= _NUMPY_BELOW:
        return fail(
            "numpy",
            f"{version}: Paddle's GradScaler raises at the first overflow with 2.4 and later",
            "run `pip install 'numpy<2.4'`",
        )
    return ok("numpy", version)


def machine(case: Case) -> Iterator[Row]:
    """Processor and memory."""
    model = next((line.partition(":")[2].strip() for line in _model_lines()), platform.machine())
    cpus, free = available_cpus(), available_bytes()
    memory = "" if free is None else f", {free / 2**30:.1f} GiB of memory free"
    yield ok("host", f"{platform.node()}, {platform.system()} {platform.release()}")
    if case.local_size > cpus:
        yield warn(
            "processor",
            f"{model}, {cpus} CPUs for {case.local_size} processes{memory}",
            "processes that share a CPU wait for each other: start fewer on this machine",
        )
    else:
        yield ok("processor", f"{model}, {cpus} CPUs{memory}")


def _model_lines() -> Iterator[str]:
    return (line for line in read_cpuinfo().splitlines() if line.startswith("model name"))


def variables(case: Case) -> Iterator[Row]:
    """What the environment sets of NCCL, CUDA, Paddle and ppfleetx."""
    there = {
        name: "(not shown)" if _SECRET.search(name) else value
        for name, value in sorted(case.environ.items())
        if name.startswith(_PREFIXES) and not name.startswith(_OF_LAUNCHER)
    }
    text = " ".join(f"{name}={value}" for name, value in there.items())
    yield ok("variables", text or "none of NCCL, CUDA, Paddle or ppfleetx is set")


def paddle_loads(case: Case) -> Iterator[Row]:
    """Whether Paddle can be imported, which build it is, and that the settings of the CPU came in time."""
    was_there = "paddle" in sys.modules
    said = prepare_process(device=case.device)
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
    if is_card(case.device) and not count(kind_of(case.device)):
        yield fail(
            "visible cards",
            f"Paddle sees no {kind_of(case.device)}",
            f"load the driver, give the container its cards, and look at {visible_cards(case.device)}; on a "
            "CPU: -o Global.device=cpu",
        )
        return
    paddle.set_device(case.device)
    if was_there and not is_card(case.device):
        yield skipped("settings", "Paddle was imported before doctor, by the program that called it")
    else:
        yield ok("settings", said)
