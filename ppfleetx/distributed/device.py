"""Functions that depend on the kind of device: CPU, GPU, XPU or a plugin's device.

Devices have Paddle's names, such as ``npu:3``. The kind of a device is the part before the colon. Every
device except a CPU is called a *card*. This module imports Paddle only inside functions.
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
from ppfleetx.utils.device_support import CPU, GPU, PLUGINS_ROOT, XPU, how_to_get, no_such_card
from ppfleetx.utils.gpu_operators import GPU_BACKENDS, PLUGIN_BACKENDS, registered_types

if TYPE_CHECKING:
    import numpy as np
    import paddle


def kind_of(device: str) -> str:
    """Return the kind of a device: its name without the number, such as ``gpu`` for ``gpu:3``."""
    return device.partition(":")[0]


def is_card(device: str) -> bool:
    """Return whether a device is a card, that is, anything but a CPU."""
    return kind_of(device) != CPU


def is_gpu(device: str) -> bool:
    """Return whether a device is an NVIDIA GPU."""
    return kind_of(device) == GPU


def name_errors(device: str) -> None:
    """On a plugin's device, make Paddle's error messages say where the error occurred. By default, such a
    message can consist of only a number."""
    import paddle

    if kind_of(device) not in (CPU, GPU, XPU):
        paddle.set_flags({"FLAGS_call_stack_level": 2})


@contextmanager
def waiting_for_each_operator(device: str) -> Iterator[None]:
    """Context manager that makes an exported program on a plugin's device run one operator at a time. On
    other devices, nothing changes."""
    import paddle

    if kind_of(device) in (CPU, GPU, XPU):
        yield
        return
    # Paddle (3.3.1) reads loop conditions and frees copied memory too early on a plugin's device.
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
    """Return how many devices of ``kind`` the installed Paddle sees. Returns 0 if Paddle does not support
    that kind."""
    import paddle
    from paddle.base import core

    if kind == GPU:
        return paddle.device.cuda.device_count() if paddle.is_compiled_with_cuda() else 0
    if kind == XPU:
        return paddle.device.xpu.device_count() if paddle.is_compiled_with_xpu() else 0
    return core.get_custom_device_count(kind) if kind in core.get_all_custom_device_type() else 0


def visible_cards_variable(device: str) -> str:
    """Return the name of the environment variable that lists the cards Paddle's launcher can use, such as
    ``CUDA_VISIBLE_DEVICES``."""
    kind = kind_of(device)
    return "CUDA_VISIBLE_DEVICES" if kind == GPU else f"{kind.upper()}_VISIBLE_DEVICES"


def cards_here() -> list[str]:
    """Return the kinds of cards that the installed Paddle sees on this machine."""
    from paddle.base import core

    return [kind for kind in (GPU, XPU, *core.get_all_custom_device_type()) if count(kind)]


def choose_device(wanted: str, place: str | None = None) -> str:
    """Return the kind of device for ``wanted``, a value of ``Global.device``: for example, ``gpu`` for
    ``auto`` on a machine with GPUs. ``place`` is where the value was set, for the error message. Raises
    ConfigError if the device does not exist."""
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
    """Return the random generator of this process's device."""
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
    """Return (memory in bytes, name) of this process's card; for an XPU, the name is ``xpu``. Returns None on
    a CPU, or if Paddle does not report the memory."""
    import paddle

    kind = kind_of(paddle.get_device())
    if kind == XPU:
        return float(paddle.device.xpu.memory_total()), kind
    if kind != GPU:
        return None
    found = paddle.device.cuda.get_device_properties(paddle.get_device())
    return float(found.total_memory), found.name


def peak_memory() -> int:
    """Return the peak memory, in bytes, of this process's tensors: on its card or, without a card, in host
    memory."""
    import paddle
    from paddle.base import core

    if on_card():
        return paddle.device.max_memory_allocated()
    return core.host_memory_stat_peak_value("Allocated", 0)


def capability(device: str) -> tuple[int, int]:
    import paddle

    return paddle.device.cuda.get_device_capability(device)


def has_kernels(dtype: str) -> bool:
    """Return whether this process runs on a card that can compute in ``dtype``, a 16-bit type. The test is a
    small matmul."""
    import paddle

    if not on_card():
        return False
    # Paddle may lack the kernel, or warn and compute in float32 instead.
    try:
        with warnings.catch_warnings(), paddle.no_grad(), paddle.amp.auto_cast(dtype=dtype):
            warnings.simplefilter("ignore")
            x = paddle.ones([2, 2])
            product = paddle.matmul(x, x)
            return product.dtype == getattr(paddle, dtype) and product.astype("float32").tolist()[0][0] == 2.0
    except (RuntimeError, ValueError):
        return False


def supports_batched_p2p(device: str) -> bool:
    """Return whether sends and receives with several ranks can be started as one batch, so that their order
    does not matter. NCCL and the CPU process groups support this."""
    return kind_of(device) in (CPU, GPU)


def backends(device: str) -> tuple[str, ...]:
    """Return the names of the backends under which Paddle registers the kernels of a device. A plugin's
    device also has ``CUSTOM``, the backend of kernels that Paddle provides for all plugins."""
    kind = kind_of(device)
    return {CPU: ("CPU",), GPU: GPU_BACKENDS, XPU: ("XPU",)}.get(kind, (kind, *PLUGIN_BACKENDS))


@functools.cache
def kernel_types(kernel: str, device: str) -> frozenset[str]:
    """Return the element types that ``kernel`` supports on a device, in the installed Paddle and its
    plugins."""
    from paddle.base import core

    keys = core._get_registered_phi_kernels("function").get(kernel, ())
    return frozenset(registered_types(keys, backends(device)))


def lacks_kernel(kernel: str, x: paddle.Tensor) -> bool:
    """Return whether this process's device lacks ``kernel`` for the element type of ``x``, so that the caller
    must compute in float32. Only float16 and bfloat16 can lack a kernel. Always False while a program is
    traced for export."""
    import paddle

    if x.dtype not in (paddle.float16, paddle.bfloat16) or not paddle.in_dynamic_mode():
        return False
    device = paddle.get_device()
    dtype = str(x.dtype).removeprefix("paddle.")
    # CPUs and GPUs have all kernels that ppfleetx uses there. On other cards, Paddle would raise an error or
    # use the CPU's kernel, which waits for the card and draws from an unseeded generator.
    return kind_of(device) not in (CPU, GPU) and dtype not in kernel_types(kernel, device)


def plugin_operator(name: str) -> Callable[..., Any] | None:
    """Return the operator ``name`` from the Python package of this device's plugin. Returns None if the
    package or the operator is missing."""
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
    """Return whether AdamW's kernel moves its beta powers (``beta1**step`` and ``beta2**step``) from host
    memory to the device. The kernels for CPUs and GPUs leave the powers in host memory."""
    return kind_of(device) not in (CPU, GPU)


def profiler_targets(device: str) -> list[Any]:
    """Return the ``targets`` of ``paddle.profiler.Profiler``: the CPU and, if ``device`` is a card, its
    kind."""
    from paddle.profiler import ProfilerTarget

    cards = {CPU: [], GPU: [ProfilerTarget.GPU], XPU: [ProfilerTarget.XPU]}
    return [ProfilerTarget.CPU, *cards.get(kind_of(device), [ProfilerTarget.CUSTOM_DEVICE])]


def recorded_event() -> Any:
    """Record an event on this process's card, and return it. The event's method ``query()`` returns whether
    the card has done all work that was queued before the event."""
    import paddle

    event = paddle.device.Event()
    event.record()
    return event


def queue_copy(array: np.ndarray) -> tuple[paddle.Tensor, paddle.Tensor]:
    """Start copying ``array`` to this process's card, without waiting. Returns the new tensor and the source
    of the copy, a tensor in host memory. The caller must keep the source alive until the copy is complete."""
    import paddle

    # Paddle has pinned memory only for GPUs.
    here = place()
    if isinstance(here, paddle.CUDAPlace):
        source = paddle.to_tensor(array, place=paddle.CUDAPinnedPlace())
        return source.cuda(blocking=False), source
    source = paddle.to_tensor(array, place=paddle.CPUPlace())
    return source._copy_to(here, False), source


def queue_copy_to_host(tensor: paddle.Tensor) -> paddle.Tensor:
    """Queue a copy of a contiguous tensor to host memory and return the copy. The copy is valid only after
    the card has completed the work that is queued now."""
    import paddle

    # Paddle has pinned memory only for GPUs. On other cards, the copy waits.
    on_gpu = isinstance(place(), paddle.CUDAPlace)
    return tensor._copy_to(paddle.CUDAPinnedPlace() if on_gpu else paddle.CPUPlace(), False)


def select_card_for_thread(device_place: Any) -> None:
    """Select this process's card for the calling thread. A new thread must do this before its first CUDA
    call."""
    from paddle.base import core

    # By default, CUDA selects card 0, where every process would create a context of a few hundred MB.
    if isinstance(device_place, core.CUDAPlace):
        core.set_cuda_current_device_id(device_place.get_device_id())


OVERRIDE = "NVIDIA_TF32_OVERRIDE"
"""Environment variable of NVIDIA's libraries. If it is "0", the libraries never use TF32, whatever a program
requests."""

# Since 2.0, Paddle has TF32 switches for cuBLAS and cuDNN. GPU builds that also have these flags ignore the
# switches.
_FLAGS = ("FLAGS_cublas_allow_tf32", "FLAGS_cudnn_allow_tf32")


@contextmanager
def tf32_disabled() -> Iterator[None]:
    """Context manager that turns TF32 off, so that float32 matrix products have full precision. At the end,
    it restores the previous settings."""
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
    """Set whether cuBLAS and cuDNN may round float32 to TF32 from now on. Returns a log line with the setting
    that is in effect, because ``NVIDIA_TF32_OVERRIDE`` overrides ``allowed``."""
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
