"""``Model.loss_chunks``: the results of whole logits, without their memory."""

from dataclasses import replace

import paddle
import pytest
from paddle.base import core

from ppfleetx.config.errors import ConfigError
from tests.parity.test_plans import CHUNKS, SMALL


@pytest.mark.parametrize("model", ["gpt", "llama"])
def test_pieces_give_the_numbers_of_whole_logits(comparison, model):
    """Tied and untied heads, in training and in evaluation."""
    whole, _ = comparison.reference(model, "sgd", 8, extra=SMALL)
    pieces, _ = comparison.reference(model, "sgd", 8, extra=CHUNKS)
    assert pieces["loss"] != whole["loss"], "nothing was cut"
    assert pieces["loss"] == pytest.approx(whole["loss"], rel=1e-6)
    assert pieces["grad_norm"] == pytest.approx(whole["grad_norm"], rel=1e-6)


@pytest.mark.parametrize("tied", [True, False])
def test_logits_are_never_whole(tied):
    """Peak memory of forward and backward, counted by Paddle: less by more than the logits."""
    positions, rows, hidden, vocab = 64, 2, 8, 4000
    logits = positions * rows * vocab * 4

    def peak(pieces):
        head, target = _head(tied, hidden, vocab, pieces)
        trunk = paddle.rand([positions, rows, hidden])
        trunk.stop_gradient = False
        labels = paddle.randint(0, vocab - 5, [rows, positions])
        core.host_memory_stat_reset_peak_value("Allocated", 0)
        before = core.host_memory_stat_current_value("Allocated", 0)
        with head.loss_follows():
            loss = target(head((trunk,)), labels, paddle.ones([rows, positions]), vocab - 5).loss
        (loss * 0.5).backward()
        gradient = head.matrix()[0].grad
        return core.host_memory_stat_peak_value("Allocated", 0) - before, loss.item(), trunk.grad, gradient

    whole, loss, of_trunk, of_weight = peak(1)
    pieces, loss_in_chunks, of_trunk_in_pieces, of_weight_in_pieces = peak(16)
    assert whole - pieces > 1.5 * logits
    assert pieces < logits / 2
    assert loss_in_chunks == pytest.approx(loss, rel=1e-6)
    assert paddle.allclose(of_trunk_in_pieces, of_trunk, rtol=1e-5, atol=1e-7)
    assert paddle.allclose(of_weight_in_pieces, of_weight, rtol=1e-5, atol=1e-7)


def _head(tied, hidden, vocab, pieces):
    from ppfleetx.models.gpt.layers import Head, TiedHead
    from ppfleetx.models.gpt.spec import HeadSpec
    from ppfleetx.nn.init import Normal
    from ppfleetx.nn.layer_factory import LocalFactory
    from ppfleetx.nn.layer_spec import LinearSpec, TableSpec
    from ppfleetx.nn.stage import Stage, build_stage

    factory = LocalFactory()
    words = TableSpec(vocab, hidden, Normal(0.5)) if tied else None
    linear = None if tied else LinearSpec(hidden, vocab, "columns", True, Normal(0.5), "head")
    kwargs = {"factory": factory, "spec": HeadSpec(vocab, linear, words, pieces)}
    stage = Stage("head", TiedHead if tied else Head, kwargs, wraps=not tied)
    paddle.seed(7)
    return build_stage(stage, 1), factory.token_loss


def test_a_task_that_needs_whole_logits_refuses():
    from ppfleetx.config.loader import load_config
    from ppfleetx.core.module.gpt import GPTModule
    from ppfleetx.distributed.context import ParallelContext
    from ppfleetx.parallel.parallelize import parallelize
    from tests.parity.training import CONFIG

    class WithPenalty(GPTModule):
        def loss(self, outputs, batch, factory):
            found = super().loss(outputs, batch, factory)
            return replace(found, loss=found.loss + 1e-4 * outputs.logsumexp(-1).square().sum())

    cfg = load_config(CONFIG, ["Model.loss_chunks=4"])
    with pytest.raises(ConfigError, match=r"Model\.loss_chunks.*whole logits"):
        parallelize(WithPenalty(cfg), cfg, ParallelContext.single(), train=True)
