"""The reference device itself: late where a card is late, strict where a card is merciful, and right."""

import contextlib
import os
import sys

import pytest

from tests.device.reference import NAME, environment, obstacle
from tests.e2e.program import NANO, losses
from tests.e2e.resumption import write_corpus
from tests.helpers import programs
from tests.helpers.ranks import Pools

pytestmark = pytest.mark.skipif(bool(obstacle()), reason=obstacle())
CASES = "tests.device.cases.reference"
LATE_US = 30_000


_HALF, _ALL = ("float16", "bfloat16"), ("float32", "float16", "bfloat16")
WITHOUT_KERNEL = {
    f"{kernel}{end} {dtype}"
    for kernels, dtypes, ends in (
        ("flash_attn flash_attn_qkvpacked flashmask_attention", _HALF, ("", "_grad")),
        ("fused_rotary_position_embedding rms_norm", _ALL, ("", "_grad")),
        ("fused_softmax_mask_upper_triangle", _ALL, ("_grad",)),
        ("fused_linear_param_grad_add", _HALF, ("",)),
        ("all_reduce", ("bfloat16",), ("",)),
    )
    for kernel in kernels.split()
    for end in ends
    for dtype in dtypes
}
"""Of what plans use on a GPU: fused operators, which a CPU lacks too, and what Ascend lacks in bfloat16."""


@contextlib.contextmanager
def _on_the_device(**always):
    """``run(size, function, options, **arguments)``: values by rank, and what the ranks printed."""
    with Pools(device=NAME) as pools:

        def run(size, function, options=None, **arguments):
            pool = pools(size, **environment(**always, **(options or {})))
            values = pool.run(f"{CASES}:{function}", **arguments)
            return values, [log.read_text() for log in pool._logs]

        yield run


@pytest.fixture
def broken():
    """For ranks whose device ends in an error."""
    with _on_the_device(timeout_s=2) as run:
        yield run


@pytest.fixture(scope="module")
def ranks():
    """Values alone."""
    with _on_the_device() as run:
        yield lambda *given, **arguments: run(*given, **arguments)[0]


def test_all_that_plans_use_has_a_kernel_or_is_named(ranks):
    assert set(ranks(1, "not_registered")[0]) == WITHOUT_KERNEL


def test_kernels_run_behind_the_host(ranks):
    (found,) = ranks(1, "launching_and_waiting", delay_us=10_000, count=20)
    assert found["result"] == [21.0] * 8
    assert found["waiting"] > 5 * found["launching"]
    assert found["counters"]["kernel"][0] >= 20


def test_memory_runs_out(ranks):
    (found,) = ranks(1, "too_much_memory", limit=1 << 20)
    assert "memory" in found["said"].lower() and found["then"] == [1.0] * 3


@pytest.mark.parametrize("waits", [True, False])
def test_a_stream_that_does_not_wait_reads_too_early(ranks, waits):
    expected = 3.0 if waits else 0.0
    assert ranks(1, "streams", waits=waits, delay_us=LATE_US) == [[expected] * 4]


@pytest.mark.parametrize("waits", [True, False])
def test_a_sum_that_is_not_waited_for_is_read_too_early(ranks, waits):
    first, second = ranks(2, "asynchronous_sum", waits=waits, delay_us=LATE_US)
    assert (first, second) == (([3.0] * 4,) * 2 if waits else ([1.0] * 4, [2.0] * 4))


@pytest.mark.parametrize("keeps", [True, False])
def test_memory_that_is_still_read_is_poisoned_when_it_is_used_again(ranks, keeps):
    ((total, other, _),) = ranks(1, "freed_too_early", {"poison": 1}, keeps=keeps)
    assert other == 7.0
    assert (total == 3.0) == keeps


def test_memory_of_an_idle_device_can_be_used_again_on_any_stream(ranks):
    assert ranks(1, "used_again_on_another_stream", {"poison": 1}, times=20) == [0]


def test_ranks_that_do_different_things_are_named(broken):
    values, logs = broken(2, "different_operations")
    assert "OSError" in values
    said = "".join(logs)
    assert "all_reduce" in said and "broadcast" in said and "rank 1 of the group" in said


@pytest.mark.slow
def test_sends_wait_for_their_receives_where_that_is_asked_for(ranks, broken):
    assert ranks(2, "both_send_first") == [""] * 2
    values, _ = broken(2, "both_send_first", {"rendezvous": 1})
    assert "OSError" in values


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("refused", ["float64", "uint8"])
def test_ascend_s_limits(broken, refused):
    """After an error a device is of no use any more, so the type that is refused comes last."""
    taken = ["float32", "bfloat16", "int64"]
    values, _ = broken(2, "reductions", {"ascend": 1}, dtypes=[*taken, refused])
    assert values == [["", "", "", "OSError"]] * 2


def test_reductions_of_each_type(ranks):
    dtypes = ["float32", "float16", "bfloat16", "int32", "int64", "float64", "uint8"]
    assert ranks(2, "reductions", dtypes=dtypes) == [[""] * len(dtypes)] * 2


def test_an_error_of_the_device_stays(broken):
    values, (log,) = broken(1, "failing_kernel")
    assert values == [["OSError", "OSError"]] and "as the test asked for" in log


@pytest.mark.slow
def test_a_training_as_the_page_has_it(tmp_path):
    """A program of its own, which finds the device by its environment alone."""
    write_corpus(tmp_path / "toy")
    values = {
        "Global.device": NAME,
        "Data.Train.dataset.input_dir": tmp_path / "toy",
        "Data.Eval.dataset.input_dir": tmp_path / "toy",
        "Engine.save_load.output_dir": tmp_path / "run",
    }
    words = [word for key, value in values.items() for word in ("-o", f"{key}={value}")]
    command = [sys.executable, "-m", "ppfleetx", "train", "-c", NANO, *words]
    there = {**os.environ, **environment(poison=1, seed=7)}
    programs.ok(command, timeout=120, executed=True, cwd=tmp_path, env=there)
    steps = [loss for _, loss, _ in losses(tmp_path / "run")]
    assert all(loss < 7.0 for loss in steps) and len(steps) >= 8, "NaN where memory is read that nobody wrote"
