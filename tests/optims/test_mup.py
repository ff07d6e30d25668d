"""With ``Model.mup_base_width``, the change of the logits in a step does not grow with the width (Yang et
al., 2022)."""

from __future__ import annotations

import numpy as np
import paddle
import pytest

from ppfleetx.config.errors import ConfigError
from ppfleetx.config.loader import load_config
from ppfleetx.config.sections.model import ModelConfig
from ppfleetx.config.sections.optimizer import OptimizerConfig
from ppfleetx.models.gpt.spec import parameter_specs
from ppfleetx.models.gpt.stages import gpt_stages
from ppfleetx.models.staged_model import StagedModel
from ppfleetx.nn.layer_factory import LocalFactory
from ppfleetx.optims.build import build_optimizer

VOCAB, RATE = 64, 2.0**-6


def changes(width: int, *, base: int | None) -> float:
    """Root mean square of the change of the logits by four AdamW steps."""
    cfg = ModelConfig(
        vocab_size=VOCAB,
        hidden_size=width,
        num_layers=2,
        num_attention_heads=width // 16,
        max_position_embeddings=16,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        tie_word_embeddings=False,
        mup_base_width=base,
        initializer_range=0.1,
    )
    model = StagedModel(gpt_stages(cfg, LocalFactory()), seed=3)
    named = [(parameter.info.name, parameter) for parameter in model.parameters()]
    optimizer = build_optimizer(OptimizerConfig(), named, width_multiplier=cfg.width_multiplier)
    rng = np.random.default_rng(0)
    tokens, labels = (paddle.to_tensor(rng.integers(0, VOCAB, (4, 16))) for _ in range(2))
    places = paddle.arange(16).unsqueeze(0).expand([4, 16])
    before = None
    for _ in range(5):
        logits = model(tokens, places, None).transpose([1, 0, 2])
        before = logits.detach() if before is None else before
        after = logits.detach()
        paddle.nn.functional.cross_entropy(logits, labels).backward()
        optimizer.step(RATE)
        optimizer.clear_grad()
    return float((after - before)[..., :VOCAB].square().mean().sqrt())


def test_steps_change_the_logits_alike_at_every_width() -> None:
    ours = [changes(width, base=32) for width in (32, 256)]
    plain = [changes(width, base=None) for width in (32, 256)]
    assert ours[0] == plain[0], "at the width of the base nothing is different"
    assert ours[1] < 1.5 * ours[0]
    assert plain[1] > 2.5 * plain[0]


def test_what_it_scales() -> None:
    sizes = {"vocab_size": 64, "num_layers": 2, "num_attention_heads": 2, "max_position_embeddings": 8}
    one = ModelConfig(hidden_size=32, **sizes, mup_base_width=32)
    four = ModelConfig(hidden_size=128, **sizes, mup_base_width=32, tie_word_embeddings=False)
    narrow, wide = (
        {name: getattr(spec.init, "std", None) for name, spec in parameter_specs(cfg).items()}
        for cfg in (one, four)
    )
    assert wide["decoder.layers.1.mlp.fc1.weight"] == narrow["decoder.layers.1.mlp.fc1.weight"] / 2
    assert wide["embedding.word_embeddings.weight"] == narrow["embedding.word_embeddings.weight"]
    assert wide["head.weight"] == narrow["embedding.word_embeddings.weight"]
    assert (one.logits_factor, four.logits_factor) == (1.0, 0.25)
    assert (
        ModelConfig(hidden_size=128, **sizes, mup_base_width=32, logits_multiplier=3.0).logits_factor == 0.75
    )


@pytest.mark.parametrize("name", ["Muon", "SGD"])
def test_other_optimizers_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="AdamW's"):
        load_config("gpt_nano", ["Model.mup_base_width=32", f"Optimizer.name={name}"])
