"""The only module that distinguishes kinds of devices. Only functions that query Paddle import it.

A device has Paddle's name, such as ``npu`` or ``npu:3``. Its kind is the part before the colon: ``cpu``,
``gpu``, ``xpu``, or a name that a plugin has registered with Paddle. Every device except a CPU is called a
*card*: it has its own memory and computes in parallel with the host, which waits for the card when it reads a
result.
"""

from __future__ import annotations

import functools
import importlib
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import TYPE_CHECKING, Any

from ppfleetx.config.errors import ConfigError
from ppfleetx.utils.devices import CPU, GPU, PLUGINS_ROOT, XPU, cpu_obstacle, how_to_get, no_such_card
from ppfleetx.utils.gpu_operators import GPU_BACKENDS, PLUGIN_BACKENDS, registered_types

if TYPE_CHECKING:
    import numpy as np
    import paddle


def kind_of(device: str) -> str:
    """Return the kind of a device: ``gpu`` for ``gpu:3``."""
    return device.partition(":")[0]


def is_card(device: str) -> bool:
    """Return whether a device is not a CPU."""
    return kind_of(device) != CPU


def is_gpu(device: str) -> bool:
    """Return whether a device is an NVIDIA GPU."""
    return kind_of(device) == GPU


def name_errors(device: str) -> None:
    """Make Paddle add its call site to errors of a plugin's device, which otherwise contain only a number."""
    import paddle

    if kind_of(device) not in (CPU, GPU, XPU):
        paddle.set_flags({"FLAGS_call_stack_level": 2})


@contextmanager
def waiting_for_each_operator(device: str) -> Iterator[None]:
    """Context manager: Paddle's executor of exported programs waits for each operator on a plugin's device.

    Without this, Paddle (3.3.1) reads loop conditions and frees copied memory too early on such devices.
    """
    import paddle

    if kind_of(device) in (CPU, GPU, XPU):
        yield
        return
    before = paddle.get_flags("FLAGS_benchmark")
    paddle.set_flags({"FLAGS_benchmark": True})
    try:
        yield
    finally:
        paddle.set_flags(before)


def on_gpu() -> bool:
    import paddle

    return is_gpu(paddle.get_device())


def on_card() -> bool:
    import paddle

    return is_card(paddle.get_device())


def count(kind: str) -> int:
    """Return the number of devices of a kind that the installed Paddle sees; 0 if Paddle does not support the
    kind."""
    import paddle
    from paddle.base import core

    if kind == GPU:
        return paddle.device.cuda.device_count() if paddle.is_compiled_with_cuda() else 0
    if kind == XPU:
        return paddle.device.xpu.device_count() if paddle.is_compiled_with_xpu() else 0
    return core.get_custom_device_count(kind) if kind in core.get_all_custom_device_type() else 0


def visible_cards(device: str) -> str:
    """Return the name of the environment variable that limits the cards used by Paddle's launcher."""
    kind = kind_of(device)
    return "CUDA_VISIBLE_DEVICES" if kind == GPU else f"{kind.upper()}_VISIBLE_DEVICES"


def cards_here() -> list[str]:
    """Return the kinds of cards that the installed Paddle sees. ``Global.device: auto`` selects the first."""
    from paddle.base import core

    return [kind for kind in (GPU, XPU, *core.get_all_custom_device_type()) if count(kind)]


def choose_device(wanted: str, place: str | None = None) -> str:
    """Resolve ``Global.device`` to an available kind of device. Raises ConfigError if the configured kind is
    not available, or if the card assigned to this process does not exist."""
    import paddle

    cards = cards_here()
    if wanted == "auto" or wanted in cards:
        kind = (cards[0] if cards else CPU) if wanted == "auto" else wanted
        variable = f"FLAGS_selected_{kind}s"  # set by Paddle's launcher
        number = os.environ.get(variable, "")
        if kind != CPU and number.isdecimal() and int(number) >= count(kind):
            raise no_such_card(variable, number)
        return kind
    if wanted == CPU:
        return CPU
    builds = {GPU: paddle.is_compiled_with_cuda(), XPU: paddle.is_compiled_with_xpu()}
    if builds.get(wanted, wanted in paddle.device.get_all_custom_device_type()):
        why = f"Paddle sees no {wanted}: none is there, or none is visible to this process"
    else:
        root = os.environ.get(PLUGINS_ROOT)
        where = f" (it has looked in {PLUGINS_ROOT}={root})" if root else ""
        why = f"Paddle has found no plugin for {wanted}{where}. {how_to_get(wanted)}"
    raise ConfigError(
        f"{why}. There is {', '.join([*cards, CPU])}; to run on the CPU give -o Global.device=cpu "
        "-o Engine.mix_precision.enable=False",
        key="Global.device",
        value=wanted,
        place=place,
    )


def is_built_for_gpus() -> bool:
    """Return whether the installed Paddle is a CUDA build, even if the machine has no GPU."""
    import paddle

    return paddle.is_compiled_with_cuda()


def place() -> Any:
    import paddle

    return paddle.framework._current_expected_place_()


def generator() -> Any:
    """Return the random generator used by operators on this process's device.

    Paddle has one generator per device; ``paddle.seed`` seeds the generators of all visible devices.
    """
    from paddle.base import core

    here = place()
    if isinstance(here, core.CPUPlace):
        return core.default_cpu_generator()
    if isinstance(here, core.CUDAPlace):
        return core.default_cuda_generator(here.get_device_id())
    if isinstance(here, core.XPUPlace):
        return core.default_xpu_generator(here.get_device_id())
    return core.default_custom_device_generator(here)


def total_memory() -> tuple[float, str] | None:
    """Return the memory of this process's card in bytes and the card's name, or None if Paddle does not
    report them."""
    import paddle

    kind = kind_of(paddle.get_device())
    if kind == XPU:
        return float(paddle.device.xpu.memory_total()), kind
    if kind != GPU:
        return None
    found = paddle.device.cuda.get_device_properties(paddle.get_device())
    return float(found.total_memory), found.name


def peak_memory() -> int:
    """Return the peak of this process's tensor memory in bytes: on its card, or on a CPU in host memory."""
    import paddle
    from paddle.base import core

    if on_card():
        return paddle.device.max_memory_allocated()
    return core.host_memory_stat_peak_value("Allocated", 0)


def capability(device: str) -> tuple[int, int]:
    import paddle

    return paddle.device.cuda.get_device_capability(device)


def computes_in(dtype: str) -> bool:
    """Return whether this process's device computes in ``dtype``, ``float16`` or ``bfloat16``.

    On a card, this tries a matrix product, because Paddle may lack the kernel, or compute in float32 with
    only a warning. On a CPU, it checks the CPU's feature flags.
    """
    import paddle

    if not on_card():
        return cpu_obstacle(dtype) is None
    try:
        with warnings.catch_warnings(), paddle.no_grad(), paddle.amp.auto_cast(dtype=dtype):
            warnings.simplefilter("ignore")
            x = paddle.ones([2, 2])
            product = paddle.matmul(x, x)
            return product.dtype == getattr(paddle, dtype) and product.astype("float32").tolist()[0][0] == 2.0
    except (RuntimeError, ValueError):
        return False


def groups_messages(device: str) -> bool:
    """Return whether messages to and from several ranks can be started together, as with NCCL and with the
    CPU process groups."""
    return kind_of(device) in (CPU, GPU)


def backends(device: str) -> tuple[str, ...]:
    """Return the names of a device in Paddle's kernel registry. Some kernels are registered for all plugins;
    Paddle uses them if a plugin has no kernel of its own."""
    kind = kind_of(device)
    return {CPU: ("CPU",), GPU: GPU_BACKENDS, XPU: ("XPU",)}.get(kind, (kind, *PLUGIN_BACKENDS))


@functools.cache
def kernel_types(kernel: str, device: str) -> frozenset[str]:
    """Return the element types for which a device has a kernel in this build of Paddle and its plugin."""
    from paddle.base import core

    keys = core._get_registered_phi_kernels("function").get(kernel, ())
    return frozenset(registered_types(keys, backends(device)))


def lacks_kernel(kernel: str, x: paddle.Tensor) -> bool:
    """Return whether this process's device has no ``kernel`` for the 16-bit type of ``x``.

    Without a kernel, Paddle would fall back to the CPU's kernel, which waits for the card, copies, and draws
    from an unseeded generator; or it would raise an error if the CPU has none either. GPUs have all kernels
    of ``gpu_operators.json``.
    """
    import paddle

    if x.dtype not in (paddle.float16, paddle.bfloat16) or not paddle.in_dynamic_mode():
        return False
    device = paddle.get_device()
    dtype = str(x.dtype).removeprefix("paddle.")
    return kind_of(device) not in (CPU, GPU) and dtype not in kernel_types(kernel, device)


def plugin_operator(name: str) -> Callable[..., Any] | None:
    """Return the operator that this device's plugin provides under this name, or None."""
    import paddle

    return getattr(_operators_of_plugin(kind_of(paddle.get_device())), name, None)


@functools.cache
def _operators_of_plugin(kind: str) -> ModuleType | None:
    if kind in (CPU, GPU, XPU):
        return None
    try:
        return importlib.import_module(f"paddle_custom_device.{kind}")
    except (ImportError, OSError, RuntimeError):  # without a plugin's operators, standard operators are used
        return None


def moves_powers(device: str) -> bool:
    """Return whether AdamW's kernels move the beta powers from host memory to the device. GPU kernels
    do not."""
    return kind_of(device) not in (CPU, GPU)


def profiler_targets(device: str) -> list[Any]:
    """Return the targets that ``paddle.profiler`` records on a device."""
    from paddle.profiler import ProfilerTarget

    cards = {CPU: [], GPU: [ProfilerTarget.GPU], XPU: [ProfilerTarget.XPU]}
    return [ProfilerTarget.CPU, *cards.get(kind_of(device), [ProfilerTarget.CUSTOM_DEVICE])]


def recorded_event() -> Any:
    """Record an event after all work queued so far. Its ``query()`` returns whether the card has reached the
    event."""
    import paddle

    event = paddle.device.Event()
    event.record()
    return event


def queue_copy(array: np.ndarray) -> tuple[paddle.Tensor, paddle.Tensor]:
    """Queue a copy of ``array`` to this process's card without waiting.

    Returns:
        The copy, and its source in host memory, which must stay alive until the copy is done. The source is
        pinned on GPUs, the only devices for which Paddle has pinned memory.
    """
    import paddle

    here = place()
    if isinstance(here, paddle.CUDAPlace):
        source = paddle.to_tensor(array, place=paddle.CUDAPinnedPlace())
        return source.cuda(blocking=False), source
    source = paddle.to_tensor(array, place=paddle.CPUPlace())
    return source._copy_to(here, False), source


def queue_copy_to_host(tensor: paddle.Tensor) -> paddle.Tensor:
    """Queue a copy of a contiguous tensor to host memory. The copy is complete once the card has reached it.

    The host waits unless the memory is pinned, which Paddle supports only for GPUs.
    """
    import paddle

    on_gpu = isinstance(place(), paddle.CUDAPlace)
    return tensor._copy_to(paddle.CUDAPinnedPlace() if on_gpu else paddle.CPUPlace(), False)


def join(device_place: Any) -> None:
    """Select the process's card in the calling thread before its first CUDA call.

    Otherwise every process on the machine would create a CUDA context on card 0, which takes a few hundred MB
    there.
    """
    from paddle.base import core

    if isinstance(device_place, core.CUDAPlace):
        core.set_cuda_current_device_id(device_place.get_device_id())


OVERRIDE = "NVIDIA_TF32_OVERRIDE"
"""If this environment variable is "0", NVIDIA's libraries never use TF32, whatever a program requests."""

# Paddle has had these switches since 2.0. In GPU builds that also have the flags, the flags take precedence.
_FLAGS = ("FLAGS_cublas_allow_tf32", "FLAGS_cudnn_allow_tf32")


@contextmanager
def exact_products() -> Iterator[None]:
    """Context manager: float32 matrix products do not use TF32."""
    import paddle
    from paddle.base import core

    cublas, cudnn = core.get_cublas_switch(), core.get_cudnn_switch()
    flags = {flag: paddle.get_flags(flag)[flag] for flag in _FLAGS if flag in core.globals()}
    allow_tf32(False)
    try:
        yield
    finally:
        core.set_cublas_switch(cublas)
        core.set_cudnn_switch(cudnn)
        paddle.set_flags(flags)


def allow_tf32(allowed: bool) -> str:
    """Set whether cuBLAS and cuDNN may use TF32 in this process. Returns a line for the log.

    May be called at any time, because Paddle reads the setting for each product.
    """
    import paddle
    from paddle.base import core

    core.set_cublas_switch(allowed)
    core.set_cudnn_switch(allowed)
    for flag in _FLAGS:
        if flag in core.globals():
            paddle.set_flags({flag: allowed})
    theirs = os.environ.get(OVERRIDE)
    if theirs is not None and (theirs != "0") != allowed:
        state = "off" if theirs == "0" else "on"
        return f"float32 matrix products: TF32 is {state}, {OVERRIDE}={theirs} overrides Global.allow_tf32"
    if allowed:
        return "float32 matrix products: rounded to TF32 where the GPU can (Global.allow_tf32 = True)"
    return "float32 matrix products: exact, without TF32 (Global.allow_tf32 = False)"
