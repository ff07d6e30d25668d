"""Checks of ``ppfleetx doctor`` on a card (GPU, XPU or a plugin's device): the driver, the data types, and
the results of small computations, which must agree with the CPU's results."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
import paddle
import paddle.nn.functional as F

from ppfleetx.distributed.device import allow_tf32, capability, count, is_gpu, kind_of, total_memory
from ppfleetx.doctor.results import Row, Target, fail, lacks, ok, skipped, warn
from ppfleetx.nn.fused_ops import TABLE, obstacles

_QUERY = "index,name,driver_version,memory.total,memory.used,ecc.errors.uncorrected.volatile.total,pstate"
_QUERY_SECONDS = 20.0
_BUSY_SHARE = 0.1


def driver(target: Target) -> Iterator[Row]:
    """Report what ``nvidia-smi`` shows about each GPU: driver, memory in use, memory errors."""
    if not is_gpu(target.device):
        yield skipped("driver", f"nvidia-smi is for GPUs, and the device is {target.device}")
        return
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


def card_rows(answer: str) -> Iterator[Row]:
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


def card(target: Target) -> Iterator[Row]:
    """Report the card of this process as Paddle sees it, and the data types that the card cannot compute
    in."""
    device = paddle.get_device()
    parts, numbers = [f"{count(kind_of(device))}; this process has {device}"], {}
    found = total_memory()
    if found is not None:
        parts.append(f"{found[1]}, {found[0] / 2**30:.1f} GiB")
        numbers["memory_gib"] = found[0] / 2**30
    if is_gpu(device):
        parts.append("compute capability " + ".".join(map(str, capability(device))))
        libraries = {
            "CUDA": paddle.version.cuda(),
            "cuDNN": paddle.version.cudnn(),
            "NCCL": paddle.version.nccl(),
        }
        parts += [f"{name} {version}" for name, version in libraries.items()]
    yield ok("visible cards", ", ".join(parts), **numbers)
    for dtype in target.float_types:
        if lacks(dtype):
            yield _lacking(dtype, device, target)


def _lacking(dtype: str, device: str, target: Target) -> Row:
    """Return the report row for a data type in which the card cannot compute. The row is a failure if the
    configuration requires the type."""
    text = f"{device} does not compute in {dtype}"
    if target.cfg is None:
        return skipped(dtype, f"{text}, so the type is not tried")
    if target.cfg.Engine.mix_precision.enable == "auto":
        return skipped(dtype, f"{text}; the run computes in float32")
    return fail(
        dtype, text, "set Engine.mix_precision.dtype to float16, or Engine.mix_precision.enable to False"
    )


# -- small runs --------------------------------------------------------------------------------

Inputs = Sequence[np.ndarray]
Operator = Callable[..., paddle.Tensor]

TOLERANCE = {"float32": 1e-4, "float16": 1e-2, "bfloat16": 4e-2}
"""Largest allowed difference from the float32 result on the CPU, relative to the largest magnitude in that
result."""
_FIX = "this card, its driver or this build of Paddle computes wrongly: try another card, then Paddle 3.3.x"


def _random(*shape: int) -> np.ndarray:
    return np.random.default_rng(len(shape)).standard_normal(shape).astype(np.float32)


def _ids(*shape: int) -> np.ndarray:
    return np.random.default_rng(1).integers(0, 16, shape)


# The operators of a training step and their inputs. Float inputs are converted to the type under test;
# integer inputs are not.
OPERATORS: dict[str, tuple[Operator, Inputs]] = {
    "matmul": (paddle.matmul, (_random(24, 32), _random(32, 40))),
    "batched matmul": (lambda a, b: paddle.matmul(a, b, transpose_y=True), (_random(2, 3, 8, 16),) * 2),
    "linear": (F.linear, (_random(24, 32), _random(32, 40), _random(40))),
    "softmax": (F.softmax, (_random(4, 33),)),
    "layer_norm": (lambda x, w, b: F.layer_norm(x, 32, w, b), (_random(5, 32), _random(32), _random(32))),
    "gelu": (lambda x: F.gelu(x, approximate=True), (_random(7, 32),)),
    "silu": (F.silu, (_random(7, 32),)),
    "embedding": (lambda table, ids: F.embedding(ids, table), (_random(16, 32), _ids(4, 9))),
    "add": (paddle.add, (_random(7, 32), _random(32))),
    "multiply": (paddle.multiply, (_random(7, 32), _random(32))),
    "mean and rsqrt": (lambda x: x * paddle.rsqrt(x.square().mean(-1, keepdim=True)), (_random(7, 32),)),
    "transpose, strided": (lambda x: x.transpose([1, 0, 2]).reshape([0, -1]) * 2, (_random(3, 5, 8),)),
    "concat and split": (lambda x: paddle.concat(x.chunk(2, axis=-1)[::-1], axis=-1), (_random(5, 32),)),
    "where": (lambda x: paddle.where(x > 0, x, paddle.zeros_like(x)), (_random(5, 32),)),
    "sum": (paddle.sum, (_random(64, 64),)),
    "cross_entropy": (
        lambda x, ids: F.cross_entropy(x.astype("float32"), ids, reduction="none"),
        (_random(9, 16), _ids(9)),
    ),
}


def small_operators(target: Target) -> Iterator[Row]:
    """Run the operators of a training step on the card, in float32 and the configured 16-bit types, and
    compare the results with the CPU's results. Also report in which types the fused kernels agree with plain
    operators. Types that the card does not support are left out."""
    types = [dtype for dtype in target.float_types if dtype in TOLERANCE and not lacks(dtype)]
    for dtype in types:
        yield operators_row(dtype, target.device)
    for name, reasons in obstacles(list(TABLE), types).items():
        well = [dtype for dtype, reason in reasons.items() if reason is None]
        others = "; ".join(f"{dtype}: {reason}" for dtype, reason in reasons.items() if reason)
        text = f"equals plain operators in {', '.join(well)}" if well else "is not used"
        yield ok(f"fused {name}", f"{text}{f' ({others})' if others else ''}")


def operators_row(
    dtype: str, device: str, operators: Mapping[str, tuple[Operator, Inputs]] = OPERATORS
) -> Row:
    """Run each operator forward and backward in ``dtype`` on ``device``, and compare results and gradients
    with float32 on the CPU. TF32 is switched off."""
    wrong, worst = [], 0.0
    allow_tf32(False)
    for name, (operator, inputs) in operators.items():
        expected = _run(operator, inputs, "float32", "cpu")
        found = _run(operator, inputs, dtype, device)
        error = max(_difference(one, other) for one, other in zip(found, expected, strict=True))
        worst = max(worst, error)
        if not error <= TOLERANCE[dtype]:
            wrong.append(f"{name} by {error:.1e}")
    if wrong:
        return fail(
            f"operators {dtype}", f"differ from the CPU: {', '.join(wrong)}", _FIX, relative_error=worst
        )
    text = f"{len(operators)} forward and backward: differ from the CPU by at most {worst:.1e}"
    return ok(f"operators {dtype}", text, relative_error=worst)


def _run(operator: Operator, inputs: Inputs, dtype: str, device: str) -> list[np.ndarray]:
    before = paddle.get_device()
    paddle.set_device(device)
    try:
        tensors = [paddle.to_tensor(array) for array in inputs]
        floats = [t.astype(dtype) if t.dtype == paddle.float32 else t for t in tensors]
        for tensor in floats:
            tensor.stop_gradient = tensor.dtype == paddle.int64
        result = operator(*floats)
        weights = paddle.arange(result.size, dtype="float32").reshape(result.shape).cos()
        (result.astype("float32") * weights).sum().backward()
        found = [result, *(tensor.grad for tensor in floats if not tensor.stop_gradient)]
        return [tensor.astype("float32").numpy() for tensor in found]
    finally:
        paddle.set_device(before)


def _difference(found: np.ndarray, expected: np.ndarray) -> float:
    return float(np.abs(found - expected).max() / max(np.abs(expected).max(), 1e-6))
