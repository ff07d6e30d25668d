"""The loss of an evaluation over large vocabularies, against NumPy in float64."""

import numpy as np
import paddle
import pytest

from ppfleetx.config.errors import ConfigError
from ppfleetx.nn import loss_output
from ppfleetx.nn.cpu_ops import ops
from ppfleetx.nn.loss import cross_entropy, token_loss
from ppfleetx.nn.loss_output import as_loss_output
from tests.parity.test_loss_chunks import _head

S, B = 12, 2


def example(vocab: int, padding: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Logits like those of trained models: few tokens are likely, most are very unlikely."""
    rng = np.random.default_rng(vocab)
    logits = (rng.standard_normal([S, B, vocab + padding]) * 2.0).astype(np.float32)
    logits[..., :20] += rng.uniform(8.0, 14.0, [S, B, 20]).astype(np.float32)
    return logits, rng.integers(0, 20, [B, S]), (rng.random([B, S]) < 0.8).astype(np.float32)


def in_float64(logits: np.ndarray, labels: np.ndarray, mask: np.ndarray, vocab: int) -> float:
    true = logits[..., :vocab].astype(np.float64)
    highest = true.max(-1, keepdims=True)
    norm = np.log(np.exp(true - highest).sum(-1)) + highest[..., 0]
    own = np.take_along_axis(true, labels.T[..., None], -1)[..., 0]
    return float(((norm - own) * mask.T).sum())


@pytest.mark.parametrize("padding", [0, 47])
@pytest.mark.parametrize("vocab", [20, 49_152, 50_257, 151_936])
def test_an_evaluation_is_right_whatever_the_size_of_the_vocabulary(vocab, padding):
    logits, labels, mask = example(vocab, padding)
    expected = in_float64(logits, labels, mask, vocab)
    with paddle.no_grad():
        found = token_loss(*map(paddle.to_tensor, (logits, labels, mask)), vocab)
    rows = found.rows()
    assert found.loss.item() == pytest.approx(expected, rel=1e-7)
    assert rows.value.sum().item() == pytest.approx(expected, rel=1e-7)
    assert rows.count.tolist() == mask.sum(axis=1).tolist()


def test_so_is_one_in_pieces():
    rng, vocab = np.random.default_rng(0), 49_152
    found = []
    for pieces in (1, 3):
        head, loss = _head(True, 8, vocab, pieces)
        trunk = paddle.to_tensor((rng.standard_normal([S, B, 8]) * 3.0).astype(np.float32))
        labels = rng.integers(0, vocab, [B, S])
        with paddle.no_grad():
            logits = head((trunk,)).numpy()
            with head.loss_follows():
                outputs = head((trunk,))
            total = loss(outputs, paddle.to_tensor(labels), paddle.ones([B, S]), vocab).loss
        found.append(total.item() / in_float64(logits, labels, np.ones([B, S]), vocab))
    assert found == pytest.approx([1.0, 1.0], rel=1e-7)


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize(("vocab", "mean"), [(7, 0.0), (1030, 3e3), (49_152, 0.0)])
def test_loss_and_gradient_of_training(vocab, mean, compiled, monkeypatch):
    """A token with label -100 has neither loss nor gradient."""
    if compiled and not ops.are_available():
        pytest.skip("the operators are not compiled (python -m ppfleetx.nn.cpu_ops)")
    monkeypatch.setattr(ops, "are_available", lambda: compiled)
    rng = np.random.default_rng(vocab)
    logits = (rng.standard_normal([5, vocab]) * 3 + mean).astype(np.float32)
    labels, upstream = rng.integers(0, vocab, 5), rng.standard_normal(5).astype(np.float32)
    labels[1], upstream[3] = -100, 0.0
    valid = labels >= 0
    largest = logits.max(-1, keepdims=True).astype(np.float64)
    sums = (np.log(np.exp(logits - largest).sum(-1, keepdims=True)) + largest)[:, 0]
    own = logits[np.arange(5), np.maximum(labels, 0)]
    gradient = np.exp(logits - sums[:, None])
    gradient[np.arange(5)[valid], labels[valid]] -= 1.0
    tensor = paddle.to_tensor(logits, stop_gradient=False)
    losses = cross_entropy(tensor, paddle.to_tensor(labels))
    losses.backward(paddle.to_tensor(upstream))
    assert losses.dtype == paddle.float32
    np.testing.assert_allclose(losses.numpy(), np.where(valid, sums - own, 0.0), rtol=2e-6, atol=2e-5)
    expected = gradient * np.where(valid, upstream, 0.0)[:, None]
    np.testing.assert_allclose(tensor.grad.numpy(), expected, atol=2e-6)


@pytest.mark.skipif(not ops.are_available(), reason="the operators are not compiled")
def test_no_grad_records_nothing():
    x = paddle.randn([3, 4])
    x.stop_gradient = False
    with paddle.no_grad():
        results = ops.cross_entropy(x, paddle.zeros([3], "int64")), ops.gelu_tanh(x)
    assert all(result.stop_gradient and result.is_leaf for result in results)


@pytest.mark.skipif(not ops.are_available(), reason="the operators are not compiled")
def test_the_operators_check_labels_and_keep_nan():
    logits = paddle.to_tensor(np.full([2, 4], np.nan, np.float32), stop_gradient=False)
    with pytest.raises(OSError, match="label 4"):
        cross_entropy(logits, paddle.to_tensor([0, 4]))
    assert np.isnan(cross_entropy(logits, paddle.to_tensor([0, 3])).numpy()).all()


def test_a_pair_is_taken_for_one_more_version(monkeypatch):
    """A task may return a pair (loss sum, count), and may unpack the result of ``super().loss``."""
    logits, labels, mask = map(paddle.to_tensor, example(20))
    found = token_loss(logits, labels, mask, 20)
    warnings = []
    monkeypatch.setattr(loss_output, "_warn", warnings.append)
    loss, count = found
    assert as_loss_output((loss, count), object()).loss is found.loss
    assert count.item() == mask.sum().item()
    assert "read its `loss`" in warnings[0] and "object.loss returns a pair" in warnings[1]


@pytest.mark.parametrize("found", [None, paddle.zeros([]), paddle.zeros([2]), (1, 2, 3)])
def test_what_is_no_loss_output_is_refused(found):
    with pytest.raises(ConfigError, match=rf"object\.loss must return a LossOutput.*{type(found).__name__}"):
        as_loss_output(found, object())
