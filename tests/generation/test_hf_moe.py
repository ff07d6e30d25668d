"""Mixtures continue prompts as in transformers (recipe: tests/goldens/make_hf_moe.py)."""

import json
from pathlib import Path

import numpy as np
import paddle
import pytest

from ppfleetx.config.sections.root import GenerationConfig, ModelConfig
from ppfleetx.conversion.huggingface.config_import import model_keys
from ppfleetx.generation.continuous_batching import ContinuousBatch
from ppfleetx.generation.generator import Generator
from ppfleetx.models.gpt.stages import gpt_stages
from ppfleetx.models.staged_model import StagedModel
from ppfleetx.nn.layer_factory import InferenceFactory
from tests.helpers.hf_weights import hf_to_canonical
from tests.models.gpt_builders import assign

GOLDENS = Path(__file__).parents[1] / "goldens"
ROWS = json.loads((GOLDENS / "hf_moe_generate.json").read_text())


@pytest.fixture(scope="module", params=ROWS)
def mixture(request) -> tuple[Generator, list[list[int]], list[list[int]]]:
    """A generator, prompts, and what follows them."""
    with np.load(GOLDENS / "hf_moe.npz") as stored:
        config = json.loads(str(stored[f"{request.param}/config"]))
        start = f"{request.param}/w/"
        weights = {key.removeprefix(start): stored[key] for key in stored.files if key.startswith(start)}
    cfg, factory = ModelConfig(**model_keys(config)), InferenceFactory()
    factory.keeps_weights = True
    model = StagedModel(gpt_stages(cfg, factory), seed=1)
    for name, value in hf_to_canonical(config, lambda name: weights[name].astype(np.float32)):
        assign(model, name, value)
    prompts, following = zip(*ROWS[request.param], strict=True)
    return Generator(model, cfg, None), [*prompts], [*following]


@pytest.mark.slow_after(4)
@pytest.mark.parametrize(
    ("batch_rows", "keys"),
    [(1, {"prompt_lookup_num_tokens": 3}), (7, {}), (7, {"use_cache": False})],
    ids=str,
)
def test_greedy_search(mixture, batch_rows, keys):
    generator, prompts, following = mixture
    cfg = GenerationConfig(decode_strategy="greedy_search", max_dec_len=24, **keys)
    found = generator.generate(prompts, cfg, batch_rows=batch_rows)
    assert [list(one.ids) for [one] in found] == following


def test_rows_that_join_and_leave(mixture):
    generator, prompts, following = mixture
    batch, done, present = ContinuousBatch(generator.next_token_model), {}, []
    waiting = list(enumerate(prompts))
    with paddle.no_grad():
        while waiting or present:
            joining, waiting = waiting[:2], waiting[2:]
            batch.join([prompt for _, prompt in joining], [1] * len(joining))
            present += [number for number, _ in joining]
            tokens = batch.next_logits().argmax(-1).tolist()
            batch.append([[token] for token in tokens])
            staying = []
            for place, number in enumerate(present):
                done[number] = batch.history[place][len(prompts[number]) :]
                if len(done[number]) < 24:
                    staying.append(place)
            batch.select(staying)
            present = [present[place] for place in staying]
    assert [done[number] for number in range(len(prompts))] == following


def test_one_token_reads_the_weights_of_its_experts_alone(mixture):
    """The others may be no numbers at all."""
    generator, _, _ = mixture
    model = generator.next_token_model.model
    layer = next(layer.mlp for layer in model.sublayers() if hasattr(getattr(layer, "mlp", None), "experts"))
    hidden = paddle.randn([1, 1, layer.router.weight.shape[0]])
    with paddle.no_grad():
        chosen = layer.router(hidden)[0].choice.flatten().tolist()
        expected = layer(hidden).numpy()
        kept = {name: p.numpy() for name, p in layer.experts.named_parameters()}
        for name, parameter in layer.experts.named_parameters():
            others = np.full_like(kept[name], np.nan)
            others[chosen] = kept[name][chosen]
            parameter.set_value(others)
        got = layer(hidden).numpy()
        for name, parameter in layer.experts.named_parameters():
            parameter.set_value(kept[name])
    np.testing.assert_array_equal(got, expected)
