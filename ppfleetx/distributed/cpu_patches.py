"""Every attribute of Paddle that the CPU process groups replace, why, and for which versions.

``TABLE`` is the whole list. Nothing else in Paddle is touched, and nothing at all before
``cpu_backend.install()``. For each line ``tests/distributed/test_canaries.py`` asks the untouched Paddle
whether the reason still holds; a failing canary means that the line can go.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import paddle
from paddle.autograd import PyLayer

from ppfleetx.distributed import cpu_backend
from ppfleetx.distributed.cpu_arrays import Flat, tensor_array

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
        return cpu_backend.create_process_group(rank, world_size, group_id)

    return new_process_group


def _no_store(_: Callable[[], Any]) -> Callable[[], None]:
    def create_or_get_global_tcp_store() -> None:
        return None

    return create_or_get_global_tcp_store


# -- data parallel ----------------------------------------------------------------------------


class Reducer:
    """Averages gradients over the ranks of a data-parallel group as the backward pass yields them.

    Takes the place of Paddle's C++ ``EagerReducer``, same arguments. Buckets are reduced in the order of
    ``buckets`` on all ranks; each is started when its last gradient is there, and all are completed with
    the last one.
    """

    def __init__(
        self,
        parameters: Sequence[paddle.Tensor],
        buckets: Sequence[Sequence[int]],
        is_sparse: Sequence[bool],
        process_group: cpu_backend.CpuProcessGroup,
        bucket_bytes: Sequence[int],
        find_unused: bool,
    ) -> None:
        if any(is_sparse):
            raise NotImplementedError("sparse gradients over CPU process groups: use Embedding(sparse=False)")
        self._parameters, self._group, self._find_unused = list(parameters), process_group, find_unused
        self._buckets = [list(bucket) for bucket in buckets]
        self._bucket_of = {i: b for b, bucket in enumerate(self._buckets) for i in bucket}
        self._expecting = False
        self._ready: set[int] = set()
        self._started: list[tuple[Any, Flat, list[int]]] = []
        for index, parameter in enumerate(self._parameters):
            parameter._register_backward_hook(lambda *_, index=index: self._on_gradient(index))

    def prepare_for_backward(self, outputs: Sequence[paddle.Tensor]) -> None:
        """The next backward pass ends with averaged gradients."""
        if self._expecting and self._ready:
            missing = [self._parameters[i].name for i in range(len(self._parameters)) if i not in self._ready]
            raise RuntimeError(
                f"the last backward pass gave no gradient to {len(missing)} parameters ({missing[0]}, ...); "
                "set find_unused_parameters=True"
            )
        self._expecting, self._ready, self._started = True, set(), []
        if self._find_unused:
            # Cleared by Paddle after one run.
            paddle.base.core.eager._add_backward_final_hook(self._finish_with_unused)

    def _on_gradient(self, index: int) -> None:
        if not self._expecting:
            return
        if index in self._ready:
            raise RuntimeError(
                f"parameter {self._parameters[index].name} got its gradient twice in one backward pass: "
                "it is used both inside and outside a recomputed block, which data parallelism cannot follow"
            )
        self._ready.add(index)
        self._start_full_buckets()
        if len(self._ready) == len(self._parameters) and not self._find_unused:
            self._finish()

    def _start_full_buckets(self) -> None:
        while len(self._started) < len(self._buckets):
            bucket = self._buckets[len(self._started)]
            if not self._ready.issuperset(bucket):
                return
            arrays = [tensor_array(self._gradient(i)) for i in bucket]
            flat = Flat.pack(self._group.pool, arrays)
            dtype = self._gradient(bucket[0]).dtype
            self._started.append((self._group.all_reduce_array(flat.array, dtype, 4, False), flat, bucket))

    def _gradient(self, index: int) -> paddle.Tensor:
        """Where the gradient is: ``main_grad`` (float32) under fleet's mixed-precision wrapper."""
        parameter = self._parameters[index]
        main = getattr(parameter, "main_grad", None)
        gradient = parameter.grad if main is None else main
        if gradient is None:
            parameter.grad = paddle.zeros_like(parameter)
            gradient = parameter.grad  # not the tensor assigned: the parameter keeps a copy
        return gradient

    def _finish(self) -> None:
        for task, flat, bucket in self._started:
            task.wait()
            flat.unpack([tensor_array(self._gradient(i)) for i in bucket])
        self._expecting, self._ready, self._started = False, set(), []

    def _finish_with_unused(self) -> None:
        if not self._expecting:
            return
        unused = [i for i in range(len(self._parameters)) if i not in self._ready]
        used = paddle.to_tensor([i in self._ready for i in range(len(self._parameters))]).astype("uint8")
        self._group.all_reduce(used, 1)
        self._ready = set(range(len(self._parameters)))
        self._start_full_buckets()
        self._finish()
        for i in unused:
            if not used[i].item():
                self._parameters[i].clear_gradient(False)


# -- operators whose CPU kernels only throw ---------------------------------------------------


def _process_group(ring_id: int) -> Any:
    return paddle.distributed.get_group(ring_id).process_group


def _gather_last(tensor: paddle.Tensor, ring_id: int, nranks: int) -> paddle.Tensor:
    parts = [paddle.empty_like(tensor) for _ in range(nranks)]
    _process_group(ring_id).all_gather(parts, tensor, True)
    return paddle.concat(parts, axis=-1)


def _slice_last(tensor: paddle.Tensor, rank: int, nranks: int) -> paddle.Tensor:
    return paddle.split(tensor, nranks, axis=-1)[rank].clone()


class _Identity(PyLayer):
    """Forward a copy, backward the sum of the gradients over the group."""

    @staticmethod
    def forward(ctx: Any, tensor: paddle.Tensor, ring_id: int) -> paddle.Tensor:
        ctx.ring_id = ring_id
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, grad: paddle.Tensor) -> paddle.Tensor:
        total = grad.clone()
        _process_group(ctx.ring_id).all_reduce(total)
        return total


class _Concat(PyLayer):
    """Forward the members' tensors side by side along the last dimension, backward one's own slice."""

    @staticmethod
    def forward(ctx: Any, tensor: paddle.Tensor, rank: int, nranks: int, ring_id: int) -> paddle.Tensor:
        ctx.rank, ctx.nranks = rank, nranks
        return _gather_last(tensor, ring_id, nranks)

    @staticmethod
    def backward(ctx: Any, grad: paddle.Tensor) -> paddle.Tensor:
        return _slice_last(grad, ctx.rank, ctx.nranks)


class _Split(PyLayer):
    """Forward one's own slice of the last dimension, backward the members' gradients side by side."""

    @staticmethod
    def forward(ctx: Any, tensor: paddle.Tensor, rank: int, nranks: int, ring_id: int) -> paddle.Tensor:
        ctx.nranks, ctx.ring_id = nranks, ring_id
        return _slice_last(tensor, rank, nranks)

    @staticmethod
    def backward(ctx: Any, grad: paddle.Tensor) -> paddle.Tensor:
        return _gather_last(grad, ctx.ring_id, ctx.nranks)


class _SoftmaxCrossEntropy(PyLayer):
    """Cross-entropy of logits whose classes are split over the group in rank order.

    Computed in float32 at least; ``loss`` is ``[..., 1]``, zero at ``ignore_index``.
    """

    @staticmethod
    def forward(
        ctx: Any, logits: paddle.Tensor, label: paddle.Tensor, ignore_index: int, ring_id: int, rank: int
    ) -> tuple[paddle.Tensor, paddle.Tensor]:
        group = _process_group(ring_id)
        wide = logits if logits.dtype == paddle.float64 else logits.astype("float32")
        local = label.astype("int64") - rank * logits.shape[-1]
        peak = wide.max(axis=-1, keepdim=True)
        group.all_reduce(peak, 1)
        shifted = wide - peak
        exponent = shifted.exp()
        here = ((local >= 0) & (local < logits.shape[-1])).astype(wide.dtype)
        index = local.clip(0, logits.shape[-1] - 1)
        target = paddle.take_along_axis(shifted, index, axis=-1) * here
        sums = paddle.stack([exponent.sum(axis=-1, keepdim=True), target])
        group.all_reduce(sums)
        counted = (label != ignore_index).astype(wide.dtype)
        loss = (sums[0].log() - sums[1]) * counted
        softmax = exponent / sums[0]
        ctx.save_for_backward(softmax, index, here * counted, counted)
        ctx.dtype = logits.dtype
        softmax_out = softmax.astype(logits.dtype)
        ctx.mark_non_differentiable(softmax_out)
        return softmax_out, loss.astype(logits.dtype)

    @staticmethod
    def backward(ctx: Any, _: paddle.Tensor, grad: paddle.Tensor) -> paddle.Tensor:
        softmax, index, chosen, counted = ctx.saved_tensor()
        grad = grad.astype(softmax.dtype)
        out = softmax * (grad * counted)
        out = paddle.put_along_axis(out, index, -grad * chosen, axis=-1, reduce="add")
        return out.astype(ctx.dtype)


def _c_identity(_: Any) -> Callable[..., paddle.Tensor]:
    def c_identity(tensor: paddle.Tensor, ring_id: int = 0, *_: Any) -> paddle.Tensor:
        return _Identity.apply(tensor, ring_id)

    return c_identity


def _c_concat(_: Any) -> Callable[..., paddle.Tensor]:
    def c_concat(tensor: paddle.Tensor, rank: int, nranks: int, ring_id: int, *_: Any) -> paddle.Tensor:
        return _Concat.apply(tensor, rank, nranks, ring_id)

    return c_concat


def _c_split(_: Any) -> Callable[..., paddle.Tensor]:
    def c_split(tensor: paddle.Tensor, rank: int, nranks: int, ring_id: int, *_: Any) -> paddle.Tensor:
        return _Split.apply(tensor, rank, nranks, ring_id)

    return c_split


def _c_softmax_with_cross_entropy(_: Any) -> Callable[..., tuple[paddle.Tensor, paddle.Tensor]]:
    def c_softmax_with_cross_entropy(
        logits: paddle.Tensor, label: paddle.Tensor, ignore_index: int, ring_id: int, rank: int, nranks: int
    ) -> tuple[paddle.Tensor, paddle.Tensor]:
        return _SoftmaxCrossEntropy.apply(logits, label, ignore_index, ring_id, rank)

    return c_softmax_with_cross_entropy


def _c_embedding(original: Callable[..., paddle.Tensor]) -> Callable[..., paddle.Tensor]:
    def c_embedding(
        table: paddle.Tensor, index: paddle.Tensor, start: int = 0, vocab_size: int = -1
    ) -> paddle.Tensor:
        if table.dtype in (paddle.float16, paddle.bfloat16):
            return original(table.astype("float32"), index, start, vocab_size).astype(table.dtype)
        return original(table, index, start, vocab_size)

    return c_embedding


def _all_reduce_inplace(_: Any) -> Callable[..., paddle.Tensor]:
    def all_reduce_(tensor: paddle.Tensor, ring_id: int = 0, op: int = 0) -> paddle.Tensor:
        _process_group(ring_id).all_reduce(tensor, op)
        return tensor

    return all_reduce_


def _wait_all(_: Any) -> Callable[..., Any]:
    def synchronize(tensor: Any, *_: Any) -> Any:
        cpu_backend.wait_all()
        return tensor

    return synchronize


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
    Replacement("paddle._C_ops", "c_identity", _NO_KERNEL, _c_identity),
    Replacement("paddle._C_ops", "c_split", _NO_KERNEL, _c_split),
    Replacement("paddle._C_ops", "c_concat", _NO_KERNEL, _c_concat),
    Replacement("paddle._C_ops", "c_softmax_with_cross_entropy", _NO_KERNEL, _c_softmax_with_cross_entropy),
    Replacement(
        "paddle._C_ops",
        "c_embedding",
        "its backward corrupts the heap for float16 and is missing for bfloat16; float32 stays Paddle's",
        _c_embedding,
    ),
    Replacement(
        "paddle._C_ops", "all_reduce_", "looks the group up among Paddle's own in C++", _all_reduce_inplace
    ),
    Replacement("paddle._C_ops", "sync_calc_stream", "no CPU kernel (paddle.distributed.wait)", _wait_all),
    Replacement("paddle._C_ops", "sync_comm_stream", "no CPU kernel (paddle.distributed.wait)", _wait_all),
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
