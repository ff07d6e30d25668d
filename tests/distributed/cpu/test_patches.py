"""Whether each replacement in Paddle is still needed. If a test fails, its line in the table can go."""

from __future__ import annotations

from collections.abc import Callable

import paddle
import pytest
from paddle.base import core
from paddle.distributed import collective, parallel

from tests.helpers.ranks import free_port

HERE = "tests.distributed.cpu.test_patches:"


@pytest.fixture(scope="module")
def untouched(pools):
    return pools(1, PADDLE_UNTOUCHED="1")  # a process in which nothing is installed


def test_every_replacement_is_still_needed(untouched):
    answers = untouched.run(HERE + "needed")[0]
    assert answers
    assert [target for target, needed in answers.items() if not needed] == []


def test_nothing_is_installed_on_a_cuda_build(untouched):
    assert untouched.run(HERE + "nothing_on_cuda") == [True]


def test_every_replacement_has_a_canary(pools):
    assert pools(1).run(HERE + "replaced") == [sorted(CANARIES)]


# -- the operators that take the place of Paddle's on the CPU --------------------------------------

CASES = "tests.distributed.cpu.cases:"


@pytest.mark.parametrize(("dtype", "limit"), [("float32", 2e-6), ("float64", 1e-12)])
@pytest.mark.parametrize("size", [2, 3])
def test_parallel_cross_entropy(pools, size, dtype, limit):
    for differences in pools(size).run(CASES + "parallel_cross_entropy", dtype=dtype):
        assert max(differences) < limit


@pytest.mark.parametrize("vocab", [49_152, 151_936])
def test_loss_of_an_evaluation_in_columns_of_several_ranks(pools, vocab):
    assert max(pools(2).run(CASES + "evaluation_loss", vocab=vocab, padding=256)) < 2e-7


def test_identity(pools):
    pools(3).run(CASES + "identity")


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_embedding_in_16_bits(pools, dtype):
    pools(2).run(CASES + "embedding_in_half", dtype=dtype)


# -- in the ranks: does unpatched Paddle still need each patch? -------------------------------------

OPERATORS = {
    "c_identity": lambda op: op(paddle.ones([2]), 0, True, True),
    "c_softmax_with_cross_entropy": lambda op: op(
        paddle.ones([2, 4]), paddle.zeros([2, 1], dtype="int64"), -100, 0, 0, 1
    ),
    "c_embedding": lambda op: op(
        paddle.ones([4, 2]).astype("bfloat16"), paddle.zeros([2], dtype="int64"), 0, 4
    ),
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
    """The error of Paddle's store on rank 0 of two after the time limit, if rank 1 does not come."""
    try:
        core.TCPStore("127.0.0.1", free_port(), True, 2, 1)
    except SystemError as error:
        return "rank" not in str(error)
    return False


CANARIES: dict[str, Callable[[], bool]] = {
    "paddle.distributed.collective._new_process_group_impl": gloo_lacks_reduce_scatter,
    "paddle.distributed.parallel._new_process_group_impl": lambda: (
        parallel._new_process_group_impl is collective._new_process_group_impl
    ),
    "paddle.base.core.create_or_get_global_tcp_store": store_names_nobody,
    "paddle.distributed.parallel.ParallelEnv._device_id": lambda: fails(
        lambda: parallel.ParallelEnv().device_id
    ),
    **{
        f"paddle._C_ops.{name}": (
            lambda name=name, call=call: fails(lambda: call(getattr(paddle._C_ops, name)))
        )
        for name, call in OPERATORS.items()
    },
}


def needed() -> dict[str, bool]:
    return {target: canary() for target, canary in CANARIES.items()}


def replaced() -> list[str]:
    """The targets of the patch table. Also checks that a second install changes nothing."""
    from ppfleetx.distributed.cpu import backend as cpu_backend
    from ppfleetx.distributed.cpu import patches as cpu_patches

    cpu_backend.install()
    first = {e.target: getattr(cpu_patches.resolve_owner(e), e.name) for e in cpu_patches.TABLE}
    cpu_backend.install()
    for entry in cpu_patches.TABLE:
        assert getattr(cpu_patches.resolve_owner(entry), entry.name) is first[entry.target]
        assert entry.reason
    return sorted(first)


def nothing_on_cuda() -> bool:
    """A build that reports CUDA is not patched."""
    from ppfleetx.distributed.cpu import backend as cpu_backend

    before = core.create_or_get_global_tcp_store
    paddle.is_compiled_with_cuda, original = (lambda: True), paddle.is_compiled_with_cuda
    try:
        installed = cpu_backend.install()
    finally:
        paddle.is_compiled_with_cuda = original
    return not installed and core.create_or_get_global_tcp_store is before
