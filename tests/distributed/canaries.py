"""For each replaced attribute: does the untouched Paddle still need the replacement?"""

from __future__ import annotations

import inspect
from collections.abc import Callable

import paddle
from paddle.base import core
from paddle.distributed import collective, parallel
from paddle.distributed.fleet.meta_parallel.sharding import (
    group_sharded_optimizer_stage2,
    group_sharded_stage3,
    group_sharded_storage,
    group_sharded_utils,
)
from paddle.distributed.fleet.recompute import recompute_hybrid
from paddle.distributed.fleet.utils import tensor_fusion_helper
from paddle.distributed.sharding import group_sharded

from tests.helpers.ranks import free_port

OPERATORS = {
    "c_identity": lambda op: op(paddle.ones([2]), 0, True, True),
    "c_split": lambda op: op(paddle.ones([2]), 0, 1, 0, True),
    "c_concat": lambda op: op(paddle.ones([2]), 0, 1, 0, True, True),
    "c_softmax_with_cross_entropy": lambda op: op(
        paddle.ones([2, 4]), paddle.zeros([2, 1], dtype="int64"), -100, 0, 0, 1
    ),
    "c_embedding": lambda op: op(
        paddle.ones([4, 2]).astype("bfloat16"), paddle.zeros([2], dtype="int64"), 0, 4
    ),
    "all_reduce_": lambda op: op(paddle.ones([2]), 0, 0),
    "sync_calc_stream": lambda op: op(paddle.ones([2])),
    "sync_comm_stream": lambda op: op([paddle.ones([2])], 0),
}


def fails(call: Callable[[], object]) -> bool:
    try:
        call()
    except (
        RuntimeError,
        ValueError,
        AssertionError,
        AttributeError,
        TypeError,
        OSError,
        NotImplementedError,
    ):
        return True
    return False


def gloo_lacks_reduce_scatter() -> bool:
    store = core.TCPStore("127.0.0.1", free_port(), True, 1, 30)
    group = core.ProcessGroupGloo.create(store, 0, 1, 1)
    return fails(
        lambda: group.reduce_scatter_tensor(paddle.ones([2]), paddle.ones([2]), core.ReduceOp.SUM, True)
    )


def store_names_nobody() -> bool:
    """Rank 0 of two, alone: what it is told when the time is up."""
    try:
        core.TCPStore("127.0.0.1", free_port(), True, 2, 1)
    except SystemError as error:
        return "rank" not in str(error)
    return False


def gradient_moves_after_zeroing() -> bool:
    parameter = paddle.create_parameter([4], "float32")
    (parameter * 2).sum().backward()
    before = parameter.grad.data_ptr()
    parameter.clear_gradient(True)
    (parameter * 2).sum().backward()
    return parameter.grad.data_ptr() != before


def asks_for_a_card(module) -> bool:
    source = inspect.getsource(module)
    return 'get_device().split(":")' in source or "get_all_custom_device_type()" in source


def device_type_is_refused() -> bool:
    return fails(tensor_fusion_helper.get_current_device_type)


def recompute_is_refused() -> bool:
    def run() -> None:
        x = paddle.ones([2])
        x.stop_gradient = False
        context = {"mp_group": None, "offload": False, "partition": False}
        recompute_hybrid.recompute_hybrid(context, lambda t: t * 2, x)

    return fails(run)


def sharding_is_refused() -> bool:
    layer = paddle.nn.Linear(2, 2)
    optimizer = paddle.optimizer.AdamW(parameters=layer.parameters())
    return fails(lambda: group_sharded.group_sharded_parallel(layer, optimizer, "os_g"))


FLEET = "paddle.distributed.fleet"
SHARDING = f"{FLEET}.meta_parallel.sharding.group_sharded"

CANARIES: dict[str, Callable[[], bool]] = {
    "paddle.distributed.collective._new_process_group_impl": gloo_lacks_reduce_scatter,
    "paddle.distributed.parallel._new_process_group_impl": lambda: (
        parallel._new_process_group_impl is collective._new_process_group_impl
    ),
    "paddle.base.core.create_or_get_global_tcp_store": store_names_nobody,
    "paddle.base.core.EagerReducer": lambda: fails(
        lambda: core.EagerReducer(
            [paddle.create_parameter([2], "float32")], [[0]], [False], object(), [1], False
        )
    ),
    "paddle.base.core.nccl_version": lambda: not hasattr(core, "nccl_version"),
    "paddle.distributed.parallel.ParallelEnv._device_id": lambda: fails(
        lambda: parallel.ParallelEnv().device_id
    ),
    **{
        f"paddle._C_ops.{name}": (
            lambda name=name, call=call: fails(lambda: call(getattr(paddle._C_ops, name)))
        )
        for name, call in OPERATORS.items()
    },
    "paddle.Tensor.clear_gradient": gradient_moves_after_zeroing,
    "paddle.Tensor.cuda": lambda: fails(lambda: paddle.ones([2]).cuda()),
    f"{FLEET}.utils.tensor_fusion_helper.__current_device_type__": device_type_is_refused,
    f"{FLEET}.utils.tensor_fusion_helper.alignment": lambda: "cpu" not in tensor_fusion_helper.alignment,
    "paddle.distributed.sharding.group_sharded.paddle": sharding_is_refused,
    f"{FLEET}.recompute.recompute_hybrid.paddle": recompute_is_refused,
    f"{SHARDING}_optimizer_stage2.paddle": lambda: asks_for_a_card(group_sharded_optimizer_stage2),
    f"{SHARDING}_stage3.paddle": lambda: asks_for_a_card(group_sharded_stage3),
    f"{SHARDING}_utils.paddle": lambda: asks_for_a_card(group_sharded_utils),
    f"{SHARDING}_storage.paddle": lambda: asks_for_a_card(group_sharded_storage),
    f"{SHARDING}_optimizer_stage2.core": lambda: (
        "core.is_compiled_with_cuda()" in inspect.getsource(group_sharded_optimizer_stage2)
    ),
    f"{SHARDING}_stage3.core": lambda: (
        "core.is_compiled_with_cuda()" in inspect.getsource(group_sharded_stage3)
    ),
    f"{SHARDING}_storage.ParamStorage.add_rank_params": lambda: (
        "param._clear_data()" in inspect.getsource(group_sharded_storage.ParamStorage._add_param_as_view)
    ),
}


def needed() -> dict[str, bool]:
    return {target: canary() for target, canary in CANARIES.items()}


def replaced() -> list[str]:
    """The table's targets; also that installing twice replaces once."""
    from ppfleetx.distributed.cpu import backend as cpu_backend
    from ppfleetx.distributed.cpu import patches as cpu_patches

    cpu_backend.install()
    first = {e.target: getattr(cpu_patches.resolve_owner(e), e.name) for e in cpu_patches.TABLE}
    cpu_backend.install()
    for entry in cpu_patches.TABLE:
        assert getattr(cpu_patches.resolve_owner(entry), entry.name) is first[entry.target]
        assert entry.reason
        assert entry.versions
    return sorted(first)


def nothing_on_cuda() -> bool:
    """On a build with CUDA (as far as it says) nothing is touched."""
    from ppfleetx.distributed.cpu import backend as cpu_backend

    before = core.EagerReducer
    paddle.is_compiled_with_cuda, original = (lambda: True), paddle.is_compiled_with_cuda
    try:
        installed = cpu_backend.install()
    finally:
        paddle.is_compiled_with_cuda = original
    return not installed and core.EagerReducer is before


def watched() -> list[str]:
    return sorted(CANARIES)
