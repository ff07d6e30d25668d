"""Gradients leave in buckets while the backward pass runs."""

from types import SimpleNamespace

import paddle
import pytest
from paddle.base import core

from ppfleetx.config.parallel_plan import ParallelPlan as Plan
from ppfleetx.distributed.context import ParallelContext
from ppfleetx.nn.init import Constant
from ppfleetx.nn.param_spec import dense
from ppfleetx.nn.stage import declare
from ppfleetx.parallel.grad_buckets import Bucket, BucketSums, cut
from ppfleetx.parallel.grad_sync import GradientSync

LAYERS = 6


class Log:
    """Record events in order. A stand-in for a sum doubles its tensor when it is waited for."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.arrived: set[str] = set()

    def start(self, name: str):
        def begin(flat: paddle.Tensor) -> SimpleNamespace:
            self.events.append(f"send {name}")
            return SimpleNamespace(
                wait=lambda: self._arrive(name, flat), is_completed=lambda: name in self.arrived
            )

        return begin

    def _arrive(self, name: str, flat: paddle.Tensor) -> None:
        self.events.append(f"have {name}")
        flat.detach().scale_(2.0)


def _layers(log: Log) -> tuple[list[paddle.nn.Linear], BucketSums]:
    """Six layers; each bucket has the weights of two, the last ones first."""
    layers = [paddle.nn.Linear(8, 8, bias_attr=False) for _ in range(LAYERS)]
    for number, layer in enumerate(layers):
        layer.weight.info = SimpleNamespace(name=f"layer {number}")
        layer.weight._register_backward_hook(lambda *_, n=number: log.events.append(f"gradient {n}"))
    buckets = cut([layer.weight for layer in reversed(layers)], nbytes=2 * 8 * 8 * 4)
    sums = BucketSums([Bucket(bucket, log.start(str(i))) for i, (_, bucket) in enumerate(buckets)])
    return layers, sums


def _step(layers, sums, log, num_passes):
    log.events.clear()
    for layer in layers:
        layer.weight.clear_gradient(False)
    sums.begin(num_passes)
    for seed in range(num_passes):
        paddle.seed(seed)
        hidden = paddle.rand([4, 8])
        for layer in layers:
            hidden = layer(hidden)
        log.events.append("pass")
        hidden.sum().backward()
    log.events.append("end")
    sums.finish()
    return [layer.weight.grad.numpy() for layer in layers]


def test_buckets_leave_in_order_during_the_last_pass():
    log = Log()
    layers, sums = _layers(log)
    first = _step(layers, sums, log, 2)
    learns = [event for event in log.events if event.startswith(("send", "have", "end"))]
    assert learns == ["end", "send 0", "send 1", "send 2", "have 0", "have 1", "have 2"]
    second = _step(layers, sums, log, 2)
    assert all((a == b).all() for a, b in zip(first, second, strict=True))
    assert log.events[: 1 + LAYERS] == ["pass", *(f"gradient {n}" for n in reversed(range(LAYERS)))]
    last = log.events[1 + LAYERS :]
    assert last == [
        *("pass", "gradient 5", "gradient 4", "send 0", "gradient 3", "gradient 2", "send 1"),
        *("gradient 1", "gradient 0", "send 2", "end", "have 0", "have 1", "have 2"),
    ]
    assert _step(layers, sums, log, 3)[0].shape == (8, 8), "another number of micro batches"
    assert log.events.index("send 0") > log.events.index("pass", 2 + 2 * LAYERS - 1)
    assert log.events[-4:] == ["end", "have 0", "have 1", "have 2"], "the pass waits for nothing"


def test_what_has_arrived_is_let_go():
    log = Log()
    layers, sums = _layers(log)
    first = _step(layers, sums, log, 1)
    log.arrived = {"0", "2"}
    second = _step(layers, sums, log, 1)
    assert [event for event in log.events if event.startswith(("send", "have", "end"))] == [
        *("send 0", "have 0", "send 1", "send 2", "end", "have 1", "have 2")
    ]
    assert all((a == b).all() for a, b in zip(first, second, strict=True))


def test_a_parameter_that_was_idle_in_the_first_steps_holds_nothing_up_later():
    """The learned bound of an input has no gradient until the input has a scale."""
    log = Log()
    weight, bound = (paddle.create_parameter([8], "float32") for _ in range(2))
    bound.is_idle = True
    sums = BucketSums([Bucket([weight, bound], log.start("0"))])
    orders = []
    for step in range(4):
        bound.is_idle = step < 2
        log.events.clear()
        sums.begin(2)
        for _ in range(2):
            (weight if bound.is_idle else weight * bound).sum().backward()
        log.events.append("end")
        sums.finish()
        weight.clear_gradient(False)
        bound.clear_gradient(False)
        orders.append([event for event in log.events if event in ("send 0", "end")])
    early, late = ["send 0", "end"], ["end", "send 0"]
    assert orders == [late, early, late, early]


def test_a_gradient_that_comes_too_late_is_an_error():
    log = Log()
    layers, sums = _layers(log)
    _step(layers, sums, log, 1)
    sums.begin(1)
    layers[5](paddle.rand([4, 8])).sum().backward()
    with pytest.raises(RuntimeError, match=r"layer 5.*reduce_overlap"):
        sums._order._on_gradient(layers[5].weight)


def test_a_bucket_holds_one_kind_and_fills_up():
    parameters = [SimpleNamespace(size=10, element_size=lambda: 4, dtype="f", owner=i % 2) for i in range(8)]
    found = cut(parameters, 80, lambda p: p.owner)
    assert [(key, len(bucket)) for key, bucket in found] == [(0, 2), (1, 2), (0, 2), (1, 2)]
    assert {id(p) for _, bucket in found for p in bucket} == {id(p) for p in parameters}
    parameters[3].size = 20
    assert [len(bucket) for _, bucket in cut(parameters, 80)] == [2, 1, 2, 2, 1], "the large one alone"
    assert all(p.owner == key for key, bucket in found for p in bucket)


def test_buckets_leave_in_the_order_in_which_they_are_complete():
    """A full bucket is sent at once, not when the next parameter arrives, which may be layers later. A nearly
    full bucket does not wait for a small parameter."""
    sizes = [10, 20, 12, 15, 1]
    parameters = [SimpleNamespace(size=size, element_size=lambda: 4, dtype="f") for size in sizes]
    places = [[parameters.index(p) for p in bucket] for _, bucket in cut(parameters, 80)]
    assert places == [[0], [1], [2], [3], [4]]


def test_one_bucket_beside_the_gradients():
    """By Paddle's statistics, sums need extra memory for one bucket only, even if none of them arrives before
    the end of the pass."""
    layers = [paddle.nn.Linear(128, 128, bias_attr=False) for _ in range(16)]
    size = 128 * 128 * 4
    start = lambda flat: SimpleNamespace(wait=lambda: None, is_completed=lambda: False)  # noqa: E731
    buckets = cut([layer.weight for layer in reversed(layers)], nbytes=2 * size)
    sums = BucketSums([Bucket(bucket, start) for _, bucket in buckets])

    def peak(begins):
        for layer in layers:
            layer.weight.clear_gradient(False)
        hidden = paddle.rand([1, 128])
        for layer in layers:
            hidden = layer(hidden)
        sums.begin(1) if begins else sums.begin(10**6)
        core.host_memory_stat_reset_peak_value("Allocated", 0)
        before = core.host_memory_stat_current_value("Allocated", 0)
        hidden.sum().backward()
        taken = core.host_memory_stat_peak_value("Allocated", 0) - before
        sums.finish()
        return taken

    peak(True)
    assert peak(True) - peak(False) <= 2 * size


@pytest.mark.slow_after(2)
@pytest.mark.parametrize(
    "plan",
    [
        Plan(dp=2),
        Plan(sep=2),
        Plan(sharding=2),
        Plan(sharding=2, sharding_stage=2),
        Plan(sharding=2, sharding_stage=3),
    ],
    ids=str,
)
def test_overlap_changes_no_bit(comparison, plan):
    def run(overlaps):
        keys = ("reduce_overlap", "broadcast_overlap")
        extra = {"Model.num_layers": 2, **{f"Distributed.sharding.{key}": overlaps for key in keys}}
        return comparison.run_plan(plan, "gpt", "adamw", 4, steps=3, extra=extra)

    overlapped, at_the_end = run(True), run(False)
    assert overlapped == at_the_end


@pytest.mark.parametrize(
    "plan",
    [
        Plan(dp=2),
        Plan(sharding=2),
        Plan(sharding=2, sharding_stage=2),
        Plan(sharding=2, sharding_stage=3),
        Plan(dp=2, pp=2),
    ],
    ids=str,
)
def test_what_is_updated_begins_where_vectors_may(comparison, plan):
    """Kernels for many tensors load vectors without a check of alignment."""
    sizes = {"Model.num_layers": 2, "Model.hidden_size": 20, "Model.ffn_hidden_size": 36}
    ranks = comparison.pools.run(plan, "tests.parity.training:misaligned", sizes=sizes)
    for rank in ranks:
        assert rank["given"] and rank["misaligned"] == []


def test_partial_gradients_wait_for_the_sum_over_tensor_ranks():
    """If they were summed over replicas first, copies could differ in the last bit."""
    whole, part = (paddle.nn.Linear(4, 4, bias_attr=False).weight for _ in range(2))
    for parameter in (whole, part):
        declare(parameter, dense((4, 4), Constant(), "norm", partial=parameter is part))
    ctx = ParallelContext(Plan(dp=2, mp=2), groups={"dp": None, "mp": None})
    sync = GradientSync([whole, part], ctx, bucket_bytes=1 << 20)
    assert sync._early == {id(whole)}
