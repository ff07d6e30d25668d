"""What a card can show: the card, and of a GPU its driver and TF32."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator

import paddle

from ppfleetx.distributed.device import capability, count, is_gpu, kind_of, total_memory
from ppfleetx.distributed.tf32 import allow_tf32
from ppfleetx.doctor.case import Case, lacks
from ppfleetx.doctor.rows import Row, fail, ok, skipped, warn

_QUERY = "index,name,driver_version,memory.total,memory.used,ecc.errors.uncorrected.volatile.total,pstate"
_QUERY_SECONDS = 20.0
_BUSY_SHARE = 0.1
_EXACT, _ROUNDED = 1e-5, 1e-2


def driver(case: Case) -> Iterator[Row]:
    """What ``nvidia-smi`` says: driver, cards, memory that others use, errors."""
    program = shutil.which("nvidia-smi")
    if program is None:
        yield warn("nvidia-smi", "not found", "install the driver's tools; in a container: --gpus all")
        return
    command = [program, f"--query-gpu={_QUERY}", "--format=csv,noheader,nounits"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_QUERY_SECONDS, check=False)
    if done.returncode:
        said = (done.stderr or done.stdout).strip()
        yield fail("nvidia-smi", said, "the driver does not answer: load it, or restart the machine")
        return
    yield from card_rows(done.stdout)
    links = subprocess.run(
        [program, "topo", "-m"], capture_output=True, text=True, timeout=_QUERY_SECONDS, check=False
    )
    if links.returncode == 0 and links.stdout.strip():
        yield ok("links", _links(links.stdout))


def card_rows(answer: str) -> Iterator[Row]:
    """Rows of the answer of ``nvidia-smi --query-gpu`` (``csv,noheader,nounits``)."""
    for line in answer.strip().splitlines():
        index, name, version, total, used, errors, _ = (part.strip() for part in line.split(","))
        text = f"{name}, driver {version}, {used} of {total} MiB used"
        title = f"card {index}"
        if errors.isdigit() and int(errors):
            yield fail(title, f"{text}, {errors} uncorrected memory errors", "reset or replace the card")
        elif used.isdigit() and total.isdigit() and int(used) > _BUSY_SHARE * int(total):
            yield warn(title, text, "another program holds its memory: nvidia-smi names it")
        else:
            yield ok(title, text)


def _links(matrix: str) -> str:
    """How many pairs of cards have which kind of link, from ``nvidia-smi topo -m``."""
    kinds: dict[str, int] = {}
    rows = [line.split() for line in matrix.splitlines() if line.startswith("GPU")]
    for number, words in enumerate(rows):
        for kind in words[number + 2 : len(rows) + 1]:
            kinds[kind] = kinds.get(kind, 0) + 1
    return ", ".join(f"{count} x {kind}" for kind, count in sorted(kinds.items())) or "one card"


def card(case: Case) -> Iterator[Row]:
    """The card of this process, as Paddle sees it."""
    device = paddle.get_device()
    told, numbers = [f"{count(kind_of(device))}; this process has {device}"], {}
    found = total_memory()
    if found is not None:
        told.append(f"{found[1]}, {found[0] / 2**30:.1f} GiB")
        numbers["memory_gib"] = found[0] / 2**30
    if is_gpu(device):
        told.append("compute capability " + ".".join(map(str, capability(device))))
        libraries = {
            "CUDA": paddle.version.cuda(),
            "cuDNN": paddle.version.cudnn(),
            "NCCL": paddle.version.nccl(),
        }
        told += [f"{name} {version}" for name, version in libraries.items()]
    yield ok("visible cards", ", ".join(told), **numbers)
    for dtype in case.float_types:
        if lacks(dtype):
            yield _lacking(dtype, device, case)


def _lacking(dtype: str, device: str, case: Case) -> Row:
    """A type the card does not compute in: a failure where the configuration asks for it."""
    text = f"{device} does not compute in {dtype}"
    if case.cfg is None:
        return skipped(dtype, f"{text}; nothing of it is tried")
    return fail(
        dtype, text, "set Engine.mix_precision.dtype to float16, or Engine.mix_precision.enable to False"
    )


def tf32(case: Case) -> Iterator[Row]:
    """Whether float32 matrix products are exact when TF32 is off: against float64."""
    allowed = allows_tf32(case)
    said = allow_tf32(allowed)
    error = product_error()
    allow_tf32(False)  # what is compared with the CPU after this is exact
    if not allowed and error > _EXACT:
        yield fail(
            "TF32",
            f"{said}, but a product of 1,024 numbers is off by {error:.1e}",
            "unset NVIDIA_TF32_OVERRIDE, or set it to 0",
            relative_error=error,
        )
    elif error > _ROUNDED:
        yield fail("TF32", f"{said}: a product is off by {error:.1e}", "the card computes wrongly")
    else:
        yield ok("TF32", f"{said}; a product of 1,024 numbers is off by {error:.1e}", relative_error=error)


def allows_tf32(case: Case) -> bool:
    """What the configuration says of it."""
    return case.cfg is not None and case.cfg.Global.allow_tf32


def product_error(size: int = 1024) -> float:
    """Largest error of a float32 matrix product, relative to the largest element of the float64 one."""
    paddle.seed(7)
    one, other = (paddle.randn([size, size]) for _ in range(2))
    exact = paddle.matmul(one.astype("float64"), other.astype("float64"))
    error = (paddle.matmul(one, other).astype("float64") - exact).abs().max()
    return float((error / exact.abs().max()).item())
