"""Every attribute of Paddle that the CPU process groups replace, why, and for which versions.

``TABLE`` is the whole list. Nothing else in Paddle is touched, and nothing at all before
``cpu_backend.install()``. For each line ``tests/distributed/test_canaries.py`` asks the untouched Paddle
whether the reason still holds; a failing canary means that the line can go.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import paddle

from ppfleetx.distributed.cpu.job import create_process_group
from ppfleetx.distributed.cpu.operators import (
    make_all_reduce_inplace,
    make_c_concat,
    make_c_embedding,
    make_c_identity,
    make_c_softmax_with_cross_entropy,
    make_c_split,
    make_wait_all,
)
from ppfleetx.distributed.cpu.reducer import Reducer

_OperatorMaker = Callable[[Any], Any]


@dataclass(frozen=True)
class Replacement:
    """One replaced attribute.

    ``make`` gets the original (None where Paddle has none) and returns what takes its place.
    """

    owner: str  # import path of the module, with ":Class" where it is a class attribute
    name: str
    reason: str
    make: _OperatorMaker
    versions: str = "3.3.1"

    @property
    def target(self) -> str:
        return f"{self.owner.replace(':', '.')}.{self.name}"


_applied: dict[str, Any] = {}


def apply_patches() -> None:
    """Replace everything in ``TABLE``; a second call does nothing."""
    for entry in TABLE:
        if entry.target not in _applied:
            owner = resolve_owner(entry)
            original = getattr(owner, entry.name, None)
            setattr(owner, entry.name, entry.make(original))
            _applied[entry.target] = original


def resolve_owner(entry: Replacement) -> Any:
    """The module or class an entry's attribute belongs to."""
    path, _, class_name = entry.owner.partition(":")
    module = importlib.import_module(path)
    return getattr(module, class_name) if class_name else module


# -- start-up ---------------------------------------------------------------------------------


def _process_group_factory(original: Callable[..., Any]) -> Callable[..., Any]:
    def new_process_group(
        backend: str, store: Any, rank: int, world_size: int, *args: Any, group_id: int = 0, **kwargs: Any
    ) -> Any:
        if backend != "gloo":
            return original(backend, store, rank, world_size, *args, group_id=group_id, **kwargs)
        return create_process_group(rank, world_size, group_id)

    return new_process_group


def _no_store(_: Callable[[], Any]) -> Callable[[], None]:
    def create_or_get_global_tcp_store() -> None:
        return None

    return create_or_get_global_tcp_store


# -- tensors and storages ---------------------------------------------------------------------


def _clear_gradient(original: Callable[..., None]) -> Callable[..., None]:
    def clear_gradient(self: paddle.Tensor, set_to_zero: bool = True) -> None:
        gradient = self.grad if set_to_zero else None
        if gradient is None or not gradient._is_initialized() or not gradient.is_dense():
            original(self, set_to_zero)
        else:
            with paddle.no_grad():
                gradient.zero_()

    return clear_gradient


def _stay_on_cpu(_: Any) -> Callable[..., paddle.Tensor]:
    def cuda(self: paddle.Tensor, *_: Any, **__: Any) -> paddle.Tensor:
        return self

    return cuda


def _add_rank_params(original: Callable[..., None]) -> Callable[..., None]:
    def add_rank_params(
        self: Any,
        trainable_params: list[paddle.Tensor],
        param2align: dict[str, int],
        convert_gpu: bool = True,
    ) -> None:
        original(self, trainable_params, param2align, convert_gpu=False)

    return add_rank_params


class _ModuleView:
    """A module with some attributes of its own."""

    def __init__(self, module: Any, **attributes: Any) -> None:
        self.__dict__.update(attributes, _module=module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def _indexed_cpu(module: ModuleType) -> _ModuleView:
    """``paddle`` for code that splits the device's name at ":" and knows cards or custom devices only."""

    def get_device() -> str:
        return "cpu:0"

    device = _ModuleView(module.device, get_device=get_device, get_all_custom_device_type=lambda: ["cpu"])
    return _ModuleView(
        module,
        get_device=get_device,
        set_device=lambda name: module.set_device("cpu"),
        device=device,
        CustomPlace=lambda kind, index: module.CPUPlace(),
    )


def _claims_cuda(core: Any) -> _ModuleView:
    return _ModuleView(core, is_compiled_with_cuda=lambda: True)


_FLEET = "paddle.distributed.fleet"
_SHARDING = f"{_FLEET}.meta_parallel.sharding.group_sharded"
_NO_KERNEL = "the CPU kernel only throws"
_NEEDS_INDEX = "splits the device's name at ':' or refuses a device that is not a card"

TABLE: tuple[Replacement, ...] = (
    Replacement(
        "paddle.distributed.collective",
        "_new_process_group_impl",
        "ProcessGroupGloo lacks reduce_scatter, all_to_all, AVG and every *_on_calc_stream",
        _process_group_factory,
    ),
    Replacement(
        "paddle.distributed.parallel",
        "_new_process_group_impl",
        "the same function: this module imported it by name",
        _process_group_factory,
    ),
    Replacement(
        "paddle.base.core",
        "create_or_get_global_tcp_store",
        "waits in C++ for ranks that do not come, for 900 seconds, and its error names nobody",
        _no_store,
    ),
    Replacement(
        "paddle.base.core",
        "EagerReducer",
        "DataParallel hands its process group to C++, which takes only its own",
        lambda _: Reducer,
    ),
    Replacement(
        "paddle.base.core",
        "nccl_version",
        "absent without CUDA, yet asked for before ReduceOp.AVG is used",
        lambda original: original or (lambda: 21000),
    ),
    Replacement(
        "paddle.distributed.parallel:ParallelEnv",
        "_device_id",
        "never set on the CPU, yet read by pipeline and recompute",
        lambda _: 0,
    ),
    Replacement("paddle._C_ops", "c_identity", _NO_KERNEL, make_c_identity),
    Replacement("paddle._C_ops", "c_split", _NO_KERNEL, make_c_split),
    Replacement("paddle._C_ops", "c_concat", _NO_KERNEL, make_c_concat),
    Replacement(
        "paddle._C_ops", "c_softmax_with_cross_entropy", _NO_KERNEL, make_c_softmax_with_cross_entropy
    ),
    Replacement(
        "paddle._C_ops",
        "c_embedding",
        "its backward corrupts the heap for float16 and is missing for bfloat16; float32 stays Paddle's",
        make_c_embedding,
    ),
    Replacement(
        "paddle._C_ops",
        "all_reduce_",
        "looks the group up among Paddle's own in C++",
        make_all_reduce_inplace,
    ),
    Replacement(
        "paddle._C_ops", "sync_calc_stream", "no CPU kernel (paddle.distributed.wait)", make_wait_all
    ),
    Replacement(
        "paddle._C_ops", "sync_comm_stream", "no CPU kernel (paddle.distributed.wait)", make_wait_all
    ),
    Replacement(
        "paddle:Tensor",
        "clear_gradient",
        "zeroing marks the gradient as empty; the next backward pass moves it out of its fused buffer, "
        "and zeros are reduced (sharding v2)",
        _clear_gradient,
    ),
    Replacement("paddle:Tensor", "cuda", "flex_checkpoint calls it when loading", _stay_on_cpu),
    Replacement(
        f"{_FLEET}.utils.tensor_fusion_helper",
        "__current_device_type__",
        "fused buffers know gpu, npu and xpu only",
        lambda _: "cpu",
    ),
    Replacement(
        f"{_FLEET}.utils.tensor_fusion_helper",
        "alignment",
        "fused buffers know gpu, npu and xpu only",
        lambda original: {**original, "cpu": 64},
    ),
    Replacement("paddle.distributed.sharding.group_sharded", "paddle", _NEEDS_INDEX, _indexed_cpu),
    Replacement(f"{_FLEET}.recompute.recompute_hybrid", "paddle", _NEEDS_INDEX, _indexed_cpu),
    Replacement(f"{_SHARDING}_optimizer_stage2", "paddle", _NEEDS_INDEX, _indexed_cpu),
    Replacement(f"{_SHARDING}_stage3", "paddle", _NEEDS_INDEX, _indexed_cpu),
    Replacement(f"{_SHARDING}_utils", "paddle", _NEEDS_INDEX, _indexed_cpu),
    Replacement(f"{_SHARDING}_storage", "paddle", _NEEDS_INDEX, _indexed_cpu),
    Replacement(f"{_SHARDING}_optimizer_stage2", "core", "asserts a CUDA or XPU build", _claims_cuda),
    Replacement(f"{_SHARDING}_stage3", "core", "asserts a CUDA or XPU build", _claims_cuda),
    Replacement(
        f"{_SHARDING}_storage:ParamStorage",
        "add_rank_params",
        "frees a parameter, then copies from its .cpu(), which on the CPU is the same tensor",
        _add_rank_params,
    ),
)
