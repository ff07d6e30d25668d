"""All blocks in one operation: what the layers give, in every kind of block it can take."""

from contextlib import nullcontext

import numpy as np
import paddle
import pytest

from ppfleetx.config.sections.compress import WeightsConfig
from ppfleetx.config.sections.root import ModelConfig
from ppfleetx.generation.decoding_session import DecodingSession, NextTokenModel
from ppfleetx.generation.fused_blocks import fused_blocks_of
from ppfleetx.models.gpt.stages import gpt_stages
from ppfleetx.models.staged_model import StagedModel
from ppfleetx.nn.cpu_ops import fused_blocks, quantized
from ppfleetx.nn.layer_factory import InferenceFactory, LocalFactory
from ppfleetx.nn.quantized import with_quantized_weights

needs_operator = pytest.mark.skipif(
    not (fused_blocks.are_available() and quantized.are_available()),
    reason="the operators are not compiled (python -m ppfleetx.nn.cpu_ops)",
)
SHAPE = {
    "vocab_size": 101,
    "hidden_size": 72,
    "num_layers": 2,
    "num_attention_heads": 6,
    "max_position_embeddings": 64,
}
ROPE = {"position_embedding_type": "rope"}
BLOCKS = {
    "gpt2": {},
    "llama": {
        **ROPE,
        "hidden_act": "swiglu",
        "normalization": "RMSNorm",
        "num_query_groups": 2,
        "add_bias_linear": False,
    },
    "parallel": {"hidden_act": "gelu_exact", "parallel_residual": True},
    "sandwich": {"sandwich_norm": True, "hidden_act": "relu2"},
    "normed heads": {"qk_layernorm": True, "attention_window": 5, "hidden_act": "quick_gelu"},
    "turned in part": {**ROPE, "rotary_percent": 0.5, "hidden_act": "relu"},
    "other angles in long rows": {
        **ROPE,
        "rope_scaling": {
            "type": "longrope",
            "factor": 4.0,
            "original_max_position_embeddings": 15,
            "short_factor": [1.0, 1.0, 1.5, 2.0, 2.5, 3.0],
            "long_factor": [2.0, 1.0, 3.0, 5.0, 7.0, 9.0],
        },
    },
}
PROMPTS = [[5, 7, 9, 11, 3], [4, 3], [8] * 7]
WEIGHTS = {
    "float32": None,
    "int8": WeightsConfig(bits=8),
    "int4": WeightsConfig(bits=4, group_size=24),
    "w8a8": WeightsConfig(bits=8, activation_bits=8),
    "int8 offsets": WeightsConfig(bits=8, group_size=24, asymmetric=True),
    "int4 offsets": WeightsConfig(bits=4, group_size=24, asymmetric=True),
    "w8a8 groups": WeightsConfig(bits=8, group_size=24, activation_bits=8),
    "w4a8": WeightsConfig(bits=4, group_size=24, activation_bits=8, asymmetric=True),
}


def _model(weights: WeightsConfig | None = None, factory: type[LocalFactory] = InferenceFactory, **keys):
    cfg, made = ModelConfig(**SHAPE, **keys), factory()
    model = StagedModel(with_quantized_weights(gpt_stages(cfg, made), weights, made), seed=None)
    model.eval()
    rng = np.random.default_rng(3)
    for parameter in model.parameters():
        name, shape = parameter.info.name, parameter.shape
        if "int8" in str(parameter.dtype):  # or uint8
            parameter.set_value(rng.integers(-100, 100, shape).astype(np.int8).view(parameter.numpy().dtype))
        elif name.endswith(".scale"):
            parameter.set_value(rng.uniform(1e-3, 2e-3, shape).astype(parameter.numpy().dtype))
        else:
            centre = 1.0 if name.endswith("norm.weight") else 0.0
            parameter.set_value((centre + 0.1 * rng.standard_normal(shape)).astype(np.float32))
    return model


def _logits(model: StagedModel, prompts: list[list[int]], *, fused: bool) -> np.ndarray:
    next_token = NextTokenModel(model, SHAPE["vocab_size"])
    session, found = DecodingSession(next_token, prompts, use_cache=True), []
    with paddle.no_grad(), nullcontext() if fused else next_token.layer_by_layer():
        for step in range(36):  # past the end of the cache's first memory
            found.append(session.next_logits().numpy())
            session.append(np.arange(session.num_rows) + step)
            if step == 20 and session.num_rows > 1:
                session.select(np.array([2, 0, 0]))
    return np.stack(found)


@needs_operator
@pytest.mark.parametrize("kind", BLOCKS)
@pytest.mark.parametrize("prompts", [PROMPTS[:1], PROMPTS], ids=["one", "three"])
def test_logits_are_those_of_the_layers(kind: str, prompts: list[list[int]]) -> None:
    model = _model(**BLOCKS[kind])
    assert fused_blocks_of(model.stages[1:-1]) is not None
    expected = _logits(model, prompts, fused=False)
    np.testing.assert_allclose(_logits(model, prompts, fused=True), expected, rtol=0, atol=2e-5)


@needs_operator
@pytest.mark.parametrize("bits", [form for form in WEIGHTS if form != "float32"])
@pytest.mark.parametrize("kind", ["llama", "normed heads"])
def test_small_weights(bits: str, kind: str) -> None:
    """Prompts, too, go through the operator: of unequal length, and behind a window."""
    model = _model(WEIGHTS[bits], **BLOCKS[kind])
    assert fused_blocks_of(model.stages[1:-1]).takes_prompts
    expected = _logits(model, PROMPTS, fused=False)
    # An activation that lies between two integers may go to either when it is rounded to 8 bits.
    room = 2e-5 if WEIGHTS[bits].activation_bits is None else 5e-2
    np.testing.assert_allclose(_logits(model, PROMPTS, fused=True), expected, rtol=0, atol=room)


@needs_operator
def test_what_the_operator_does_not_do_is_left_to_the_layers() -> None:
    assert fused_blocks_of(_model(factory=LocalFactory).stages[1:-1]) is None  # weights that may still change
    hooked = _model()
    hooked.stages[1].mlp.register_forward_post_hook(lambda *_: None)
    assert fused_blocks_of(hooked.stages[1:-1]) is None
    other = _model()
    other.stages[1].mlp.activation.function = paddle.nn.functional.sigmoid
    assert fused_blocks_of(other.stages[1:-1]) is None
    assert fused_blocks_of(other.stages[2:-1]) is not None
    of_heads = _model(qk_layernorm="each_head", normalization="RMSNorm")
    assert fused_blocks_of(of_heads.stages[1:-1]) is None


@needs_operator
def test_tensors_that_do_not_fit_are_refused() -> None:
    trunk_of = fused_blocks_of(_model().stages[1:-1])
    weights = trunk_of.weights(1)
    hidden, column = paddle.randn([1, 1, 72]), paddle.to_tensor([4])
    cache = [paddle.zeros([1, 6, 5, 12]) for _ in range(4)]
    for changed, message in (
        ({"cache": cache[:3]}, "the cache does not fit"),
        ({"column": paddle.to_tensor([5])}, "the cache has no room"),
        ({"cache": [*cache[:3], paddle.zeros([1, 6, 4, 12])]}, "the cache does not fit"),
        ({"penalty": paddle.zeros([1, 1, 1, 6])}, "angles or penalties do not fit"),
        ({"hidden": paddle.randn([1, 1, 71])}, "a (block|weight) does not fit|panels do not fit"),
    ):
        given = {"hidden": hidden, "column": column, "penalty": None, "angles": None, "cache": cache}
        with pytest.raises(Exception, match=message):
            fused_blocks.run(**{**given, **changed}, weights=weights, epsilon=1e-5)
