"""Distillation: the divergence against NumPy, its gradient, and plans against one card."""

import numpy as np
import paddle
import pytest

from ppfleetx.compress.distill import divergence
from ppfleetx.config.errors import ConfigError
from ppfleetx.config.loader import load_config
from ppfleetx.config.parallel_plan import ParallelPlan as Plan
from tests.helpers.ranks import Pools
from tests.parity.comparison import TOLERANCE, Comparison
from tests.parity.training import CONFIG


def _log_softmax(logits):
    shifted = logits - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def test_divergence_and_its_gradient():
    generator = np.random.default_rng(0)
    student, teacher = (generator.normal(size=(3, 2, 7)) for _ in range(2))
    log_q, log_p = (_log_softmax(logits[..., :5] / 2.0) for logits in (student, teacher))
    q = paddle.to_tensor(student, dtype="float64", stop_gradient=False)
    each = divergence(q, paddle.to_tensor(teacher, dtype="float64"), 5, 2.0, None)
    expected = (np.exp(log_p) * (log_p - log_q)).sum(-1)
    np.testing.assert_allclose(each.numpy(), expected, rtol=1e-12)
    assert (expected > 0).all()
    (each * 3.0).sum().backward()
    gradient = np.zeros_like(student)
    gradient[..., :5] = 3.0 * (np.exp(log_q) - np.exp(log_p)) / 2.0
    np.testing.assert_allclose(q.grad.numpy(), gradient, rtol=1e-12, atol=1e-15)


@pytest.fixture(scope="module")
def comparison(tmp_path_factory):
    pools = Pools()
    yield Comparison(pools, tmp_path_factory.mktemp("distill"), short=True)
    pools.close()


@pytest.fixture(scope="module")
def teacher(comparison, tmp_path_factory):
    """A checkpoint of a model with other sizes."""
    place = tmp_path_factory.mktemp("teacher")
    comparison.pools(1).run("tests.compress.plans:save_teacher", place=str(place))
    return place


@pytest.mark.parametrize(
    "plan",
    [
        Plan(dp=2),
        Plan(mp=2, sequence_parallel=True),
        Plan(mp=2, sep=2),
        Plan(sharding=2, sharding_stage=3),
        Plan(pp=2, virtual_pp_degree=2),
        Plan(pp=2, pp_schedule="zb_h1"),
    ],
    ids=str,
)
def test_every_plan_learns_from_the_teacher_as_one_card(comparison, teacher, plan):
    extra = {"Compress.Distill": f"{{teacher: {teacher}, temperature: 3.0, hard_weight: 0.25}}"}
    found = comparison.run(plan, "gpt", "sgd", extra=extra)
    assert found.worst <= TOLERANCE, str(found)
    plain, _ = comparison.reference("gpt", "sgd", 8, steps=3, extra={"Model.num_layers": 4})
    distilled, _ = comparison.reference("gpt", "sgd", 8, steps=3, extra={"Model.num_layers": 4} | extra)
    assert distilled["loss"][0] == plain["loss"][0], "evaluation measures the cross entropy alone"
    assert abs(distilled["loss"][1] / plain["loss"][1] - 1) > 0.01


@pytest.mark.parametrize("plan", [Plan(mp=2, sequence_parallel=True), Plan(pp=2)], ids=str)
@pytest.mark.parametrize("model", ["gpt", "llama"])
def test_in_pieces(comparison, teacher, model, plan):
    """``Model.loss_chunks`` gives the losses of whole logits, which neither model ever makes."""
    extra = {"Compress.Distill": f"{{teacher: {teacher}}}", "Model.num_layers": 4}
    pieces = extra | {"Model.loss_chunks": 3}
    whole, _ = comparison.reference(model, "sgd", 8, steps=3, extra=extra)
    found, _ = comparison.reference(model, "sgd", 8, steps=3, extra=pieces)
    assert found["loss"] != whole["loss"], "nothing was cut"
    assert found["loss"] == pytest.approx(whole["loss"], rel=1e-6)
    assert found["grad_norm"] == pytest.approx(whole["grad_norm"], rel=1e-5)
    assert comparison.run(plan, model, "sgd", extra=pieces).worst <= TOLERANCE


def test_a_teacher_without_weight_is_refused():
    with pytest.raises(ConfigError, match="of 0 learns nothing of the teacher"):
        load_config(CONFIG, ["Compress.Distill.teacher=x", "Compress.Distill.soft_weight=0"])
