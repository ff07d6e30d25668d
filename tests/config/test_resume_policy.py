"""Every key says what it decides; what a resumed run changes is found by that."""

from __future__ import annotations

from copy import deepcopy

import pytest

from ppfleetx.config.loader import load_config
from ppfleetx.config.resume_policy import Effect, changes, effect_of, leaf_keys, network
from ppfleetx.config.sections.model import ModelConfig
from tools.gen_config_docs import config_markdown

SMALL = {"vocab_size": 512, "hidden_size": 64, "num_layers": 2, "num_attention_heads": 4}
OTHER = {
    "str": "another",
    "bool": True,
    "int": 7,
    "float": 0.25,
    "NoneType": 7,
    "list": ["another"],
    "dict": {"a": 1},
}


def _other(value):
    """A value of the same kind that is not equal."""
    return not value if isinstance(value, bool) else OTHER[type(value).__name__]


def test_every_key_is_classified():
    unknown = []
    for key in leaf_keys():
        try:
            effect_of(key)
        except KeyError:
            unknown.append(key)
    assert not unknown, f"say in ppfleetx/config/resume_policy.py what these decide: {', '.join(unknown)}"


def test_every_change_is_found(small):
    rope = ["Model.position_embedding_type=rope", "Model.rope_scaling={type: linear, factor: 2}"]
    moe = "{num_experts: 4, capacity: {factor: 1, policy: probs}, shared_experts: {ffn_size: 8}}"
    latent = "{kv_rank: 8, rope_head_dim: 4, nope_head_dim: 4, value_head_dim: 4}"
    sections = [*rope, f"Model.moe={moe}", f"Model.latent_attention={latent}", "Model.lora.rank=4"]
    cfg = load_config(small, ["Data.Eval.dataset.max_seq_len=64", "Data.tokenizer.dir=x", *sections])
    now = cfg.model_dump(mode="json")
    assert changes(now, cfg, set(Effect)) == []
    sections = ("Model", "Optimizer", "Data", "Engine", "Global")
    keys = [key for key in leaf_keys() if key.startswith(sections) and "weight_decay_schedule." not in key]
    for key in (key for key in keys if not key.startswith("Data.Test.")):
        saved = deepcopy(now)
        *path, last = key.split(".")
        section = saved
        for name in path:
            section = section[name]
        section[last] = _other(section[last])
        [found] = changes(saved, cfg, set(Effect))
        assert (found.key, found.then, effect_of(key)) == (key, section[last], effect_of(found.key))
        del section[last]  # an older version, which did not know the key
        assert all(change.key == key for change in changes(saved, cfg, set(Effect)))


def test_a_section_that_comes_or_goes_is_one_change(small):
    saved = load_config(small).model_dump(mode="json")
    cfg = load_config(small, ["Optimizer.grad_clip=null", "Data.Eval.dataset.max_seq_len=64"])
    found = changes(saved, cfg, (Effect.TRAINING, Effect.EVALUATION))
    assert [str(change) for change in found] == [
        "Data.Eval = {...} (was None)",
        "Optimizer.grad_clip = None (was {...})",
    ]


def test_null_and_what_it_stands_for_are_one_network():
    written = ModelConfig(**SMALL, num_query_groups=4, head_dim=16, ffn_hidden_size=256, add_qkv_bias=True)
    assert network(written) == network(ModelConfig(**SMALL))
    assert network(ModelConfig(**SMALL, rotary_base=5e5)) == network(written)
    rope = {**SMALL, "position_embedding_type": "rope"}
    assert network(ModelConfig(**rope, rotary_base=5e5)) != network(ModelConfig(**rope))
    assert network(ModelConfig(**rope, max_position_embeddings=9)) == network(ModelConfig(**rope))


@pytest.mark.parametrize("effect", Effect)
def test_the_documentation_lists_it(effect):
    assert effect.value in config_markdown()
