"""Paddle's data-parallel reducer on CPU process groups."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import paddle

from ppfleetx.distributed.cpu.arrays import Flat, tensor_array
from ppfleetx.distributed.cpu.group import CpuProcessGroup


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
        process_group: CpuProcessGroup,
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
