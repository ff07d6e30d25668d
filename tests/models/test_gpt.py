"""The whole small model: names, initial weights, causality, cache, packed documents."""

import re

import numpy as np
import paddle
import pytest

from ppfleetx.models.gpt.spec import parameter_shapes
from ppfleetx.models.gpt.stages import gpt_stages
from ppfleetx.nn.layer_factory import LocalFactory
from ppfleetx.nn.loss import token_loss
from ppfleetx.nn.stage import build_stage, canonical_parameters
from tests.models.gpt_builders import (
    LLAMA_STYLE,
    VARIANTS,
    GrowingCache,
    build,
    logits_in_pieces,
    logits_of,
    random_tokens,
    tiny_config,
)

variants = pytest.mark.parametrize("keys", VARIANTS.values(), ids=VARIANTS.keys())


@pytest.mark.parametrize("keys", [*VARIANTS.values(), {"tie_word_embeddings": False, "add_head_bias": True}])
def test_names_and_shapes_are_those_of_the_arithmetic(keys):
    cfg = tiny_config(**keys)
    built = {name: tuple(p.shape) for name, p in canonical_parameters(build(cfg)).items()}
    assert built == parameter_shapes(cfg)


@variants
def test_a_later_token_changes_no_earlier_logit(keys):
    model = build(tiny_config(**keys))
    tokens = random_tokens()
    changed = tokens.clone()
    changed[:, -1] = (changed[:, -1] + 1) % 61
    for mode in (model.train, model.eval):
        mode()
        before, after = logits_of(model, tokens), logits_of(model, changed)
        np.testing.assert_array_equal(before[:, :-1], after[:, :-1])
        assert np.abs(before[:, -1] - after[:, -1]).max() > 1e-6
        cached = logits_of(model, changed, cache=GrowingCache())
        np.testing.assert_array_equal(before[:, :-1], cached[:, :-1])


@variants
@pytest.mark.parametrize("cuts", [[12], [5, 7], [1] * 12, [6, 1, 1, 4]])
def test_cached_decoding_equals_the_full_forward(keys, cuts):
    model = build(tiny_config(**keys))
    model.eval()
    tokens = random_tokens()
    pieces = logits_in_pieces(model, tokens, cuts)
    np.testing.assert_allclose(pieces, logits_of(model, tokens), rtol=0, atol=2e-6)


@variants
def test_packed_documents_do_not_see_each_other(keys):
    model = build(tiny_config(**keys))
    tokens = random_tokens(length=10)
    positions = paddle.to_tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4, 5]] * 2)
    starts = paddle.to_tensor([[0] * 4 + [4] * 6] * 2, dtype="int32")
    packed = logits_of(model, tokens, position_ids=positions, document_start=starts)
    apart = [logits_of(model, tokens[:, :4]), logits_of(model, tokens[:, 4:])]
    np.testing.assert_allclose(packed, np.concatenate(apart, 1), rtol=0, atol=2e-6)
    together = logits_of(model, tokens, position_ids=positions)
    assert np.abs(packed - together).max() > 1e-4


@variants
def test_left_padding_changes_nothing_with_and_without_cache(keys):
    model = build(tiny_config(**keys))
    model.eval()
    tokens, pad = random_tokens(length=8), 3
    padded = paddle.concat([paddle.zeros([2, pad], "int64"), tokens], axis=1)
    positions = paddle.clip(paddle.arange(11) - pad, min=0).unsqueeze(0).expand([2, 11])
    starts = paddle.full([2, 11], pad, dtype="int32")
    inputs, plain = {"position_ids": positions, "document_start": starts}, logits_of(model, tokens)
    whole = logits_of(model, padded, **inputs)
    assert np.isfinite(whole).all()
    for found in (whole, logits_in_pieces(model, padded, [7, 1, 3], **inputs)):
        np.testing.assert_allclose(found[:, pad:], plain, rtol=0, atol=2e-6)


def test_tied_weight_is_one_parameter_and_mirrors_on_another_rank():
    stages = gpt_stages(tiny_config(), LocalFactory())
    model = build(tiny_config())
    assert model.stages[0].word_embeddings is model.stages[-1].word_embeddings
    alone = build_stage(stages[-1], seed=1)  # what the last rank of a pipeline builds
    (name, mirror), *others = canonical_parameters(alone).items()
    assert name == "embedding.word_embeddings.weight" and not others
    np.testing.assert_array_equal(mirror.numpy(), canonical_parameters(model)[name].numpy())


def test_stages_built_one_by_one_equal_the_whole():
    cfg = tiny_config(**LLAMA_STYLE)
    whole = canonical_parameters(build(cfg, seed=7))
    for stage in reversed(gpt_stages(cfg, LocalFactory())):
        for name, parameter in canonical_parameters(build_stage(stage, seed=7)).items():
            np.testing.assert_array_equal(parameter.numpy(), whole.pop(name).numpy(), err_msg=name)
    assert not whole


def test_initial_distribution():
    cfg = tiny_config(hidden_size=128, initializer_range=0.03, num_layers=8)
    parameters = canonical_parameters(build(cfg))
    for name, parameter in parameters.items():
        values = parameter.numpy()
        if parameter.ndim == 1:
            assert (values == (1.0 if name.endswith("norm.weight") else 0.0)).all(), name
            continue
        true = values[:61] if "word" in name else values
        is_output = re.search(r"out_proj|fc2", name)
        assert true.std() == pytest.approx(0.03 / 4 if is_output else 0.03, rel=0.05), name
        assert abs(true.mean()) < 0.03 * 0.05, name
    assert (parameters["embedding.word_embeddings.weight"].numpy()[61:] == 0).all()


def test_sandwich_norm_with_gain_zero_makes_blocks_the_identity():
    cfg = tiny_config(sandwich_norm=True, attn_post_norm_scale=0.0, ffn_post_norm_scale=0.0)
    model = build(cfg)
    embedded = model.stages[0]((random_tokens(), paddle.arange(12).unsqueeze(0).expand([2, 12])))
    np.testing.assert_array_equal(model.stages[1](embedded)[0].numpy(), embedded[0].numpy())
    token_loss(model(random_tokens()), random_tokens(), paddle.ones([2, 12]), 61).loss.backward()
    gain = canonical_parameters(model)["decoder.layers.0.mlp_post_norm.weight"]
    assert np.abs(gain.grad.numpy()).max() > 0


@variants
def test_training_lowers_the_loss_and_vocabulary_padding_stays_zero(keys):
    model = build(tiny_config(**keys))
    optimizer = paddle.optimizer.AdamW(1e-2, parameters=model.parameters())
    tokens, losses = random_tokens(4, 13), []
    for _ in range(8):
        loss = token_loss(model(tokens[:, :-1]), tokens[:, 1:], paddle.ones([4, 12]), 61).loss / 48
        loss.backward()
        assert all(p.grad is not None for p in model.parameters())
        optimizer.step()
        optimizer.clear_grad()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(np.log(61), abs=0.1)
    assert losses[-1] < 0.8 * losses[0]
    for name, parameter in canonical_parameters(model).items():
        if "word_embeddings" in name and keys.get("tie_word_embeddings", True):
            assert (parameter.numpy()[61:] == 0).all()
        if name == "head.weight":
            assert (parameter.numpy()[:, 61:] == 0).all()
