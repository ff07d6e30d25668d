"""Attention windows, rotary positions on a part of each head, and a separate standard deviation of
embeddings."""

import numpy as np
import paddle
import pytest

from ppfleetx.models.gpt.stages import gpt_stages
from ppfleetx.nn.layer_factory import LocalFactory
from ppfleetx.nn.masks import cached_mask, window_start
from ppfleetx.nn.positions import RotaryEmbedding
from ppfleetx.nn.stage import canonical_parameters
from tests.models.gpt_builders import (
    LLAMA_STYLE,
    build,
    logits_in_pieces,
    logits_of,
    random_tokens,
    tiny_config,
)


def test_a_window_begins_so_many_positions_before_each():
    assert window_start(2, 1, 5, None).tolist() == [[0, 0, 0, 1, 2]]
    documents = paddle.to_tensor([[0, 0, 2, 2, 2]], dtype="int32")
    assert window_start(2, 1, 5, documents).tolist() == [[0, 0, 2, 2, 2]]


@pytest.mark.parametrize("keys", [{}, LLAMA_STYLE], ids=["gpt2", "llama"])
def test_nothing_comes_from_before_the_window(keys):
    window, layers, length = 3, 2, 12
    tokens = random_tokens(length=length)
    model = build(tiny_config(**keys, attention_window=window))
    changed = tokens.clone()
    changed[:, 0] = (changed[:, 0] + 1) % 61
    before, after = logits_of(model, tokens), logits_of(model, changed)
    reach = window * layers  # each layer looks `window` positions back
    np.testing.assert_array_equal(before[:, reach + 1 :], after[:, reach + 1 :])
    assert all(np.abs(before[:, i] - after[:, i]).max() > 1e-7 for i in range(reach + 1))
    whole = build(tiny_config(**keys))
    np.testing.assert_array_equal(
        logits_of(build(tiny_config(**keys, attention_window=length)), tokens), logits_of(whole, tokens)
    )


@pytest.mark.parametrize("chunks", [[1] * 12, [5, 1, 6], [2, 3, 7]], ids=str)
def test_a_window_looks_back_into_the_cache(chunks):
    tokens = random_tokens(length=12)
    model = build(tiny_config(**LLAMA_STYLE, attention_window=3))
    pieces = logits_in_pieces(model, tokens, chunks)
    np.testing.assert_allclose(pieces, logits_of(model, tokens), rtol=0, atol=2e-6)


def test_a_window_counts_what_the_row_sees():
    """Column 1 of the second row is empty: a rejected draft token, or padding."""
    visible = np.array([[True, True, True, True], [True, False, True, True]])
    found = cached_mask(1, 5, visible, window=1)[:, 0, 0]
    assert found.tolist() == [[False, False, True, True, False], [False, False, True, True, False]]
    found = cached_mask(1, 5, visible, window=2)[:, 0, 0]
    assert found.tolist() == [[False, True, True, True, False], [True, False, True, True, False]]


def test_only_the_first_part_of_a_head_is_turned():
    """The pairs (i, i + r/2) of the first r features are rotated by position * base^(-2i/r)."""
    rng, turned, width = np.random.default_rng(3), 4, 10
    x = rng.standard_normal((2, 1, 2, 5, width)).astype(np.float32)
    positions = np.array([[0, 1, 2, 3, 4], [7, 7, 0, 1, 9]])
    angles = positions[:, None, None, :, None] * 100.0 ** (-2 * np.arange(turned // 2) / turned)
    first, second = x[..., : turned // 2].astype(float), x[..., turned // 2 : turned].astype(float)
    expected = np.concatenate(
        [
            first * np.cos(angles) - second * np.sin(angles),
            second * np.cos(angles) + first * np.sin(angles),
            x[..., turned:],
        ],
        axis=-1,
    )
    rotary = RotaryEmbedding(turned, 16, 100.0)
    got = rotary.rotate(paddle.to_tensor(x), paddle.to_tensor(positions)).numpy()
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-6)
    np.testing.assert_array_equal(got[..., turned:], x[..., turned:])


def test_a_model_turns_the_part_that_is_said():
    cfg = tiny_config(**LLAMA_STYLE, rotary_percent=0.5)
    assert cfg.head_size == 8
    assert cfg.rotary_size == 4
    tokens = random_tokens()
    half, whole = (logits_of(build(one), tokens) for one in (cfg, tiny_config(**LLAMA_STYLE)))
    assert np.abs(half - whole).max() > 1e-5
    for percent, width in ((0.1, 0), (0.4, 3)):
        with pytest.raises(ValueError, match=f"would rotate {width}, which is not an even number"):
            tiny_config(**LLAMA_STYLE, rotary_percent=percent)


@pytest.mark.parametrize("keys", [{}, LLAMA_STYLE], ids=["tied", "own head"])
def test_embeddings_have_a_spread_of_their_own(keys):
    cfg = tiny_config(**keys, hidden_size=128, vocab_size=640, embedding_initializer_range=0.5)
    plain = tiny_config(**keys, hidden_size=128, vocab_size=640)
    ours, theirs = (canonical_parameters(build(one)) for one in (cfg, plain))
    for name, parameter in ours.items():
        value, other = parameter.numpy(), theirs[name].numpy()
        if name.startswith("embedding."):
            assert np.std(value) == pytest.approx(0.5, rel=0.03)
            np.testing.assert_allclose(value, other * 25, rtol=1e-5)
        else:
            np.testing.assert_array_equal(value, other)


def test_the_embedding_may_drop_less_than_the_layers_do():
    by_layers = {"hidden_dropout_prob": 0.5, "attention_probs_dropout_prob": 0.0}

    def dropped(**keys):
        stage = gpt_stages(tiny_config(**by_layers, **keys), LocalFactory())[0]
        return stage.kwargs["spec"].dropout

    assert [dropped(), dropped(embedding_dropout_prob=0.0)] == [0.5, 0.0]
