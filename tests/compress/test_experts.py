"""Experts, and latent attention, in few bits: what the model of the rounded weights computes."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import pytest

from ppfleetx.checkpoint.resolve_checkpoint import open_resolved, resolve_checkpoint
from ppfleetx.commands.checkpoint_verbs import Quantize
from ppfleetx.commands.quantize import quantize
from ppfleetx.compress.rounding import dequantize
from ppfleetx.config.errors import ConfigError
from ppfleetx.config.sections.root import GenerationConfig
from ppfleetx.nn.stage import canonical_parameters
from tests.compress.runs import DEEPSEEK, add_adapters, logits, logits_of, opened, write_corpus, write_run

PROMPTS = ["the cat", "and the other hat", "the"]
WAYS = {
    "int8": {"to": "int8"},
    "int4": {"to": "int4", "group": 8},
    "w8a8": {"to": "int8", "activations": "int8"},
}


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory) -> Path:
    return write_run(tmp_path_factory.mktemp("deepseek") / "run", DEEPSEEK)


def rounded(name: str, small: dict[str, np.ndarray]) -> np.ndarray:
    """The values of a parameter of the quantized checkpoint."""
    levels, scale = small[name], small.get(f"{name.removesuffix('.weight')}.scale")
    if scale is None:
        return levels
    if levels.dtype == np.uint8:
        halves = np.stack([levels & 15, levels >> 4], axis=-2).astype(np.int8)
        pairs = halves.reshape([*levels.shape[:-2], -1, levels.shape[-1]])
        levels = np.where(pairs > 7, pairs - 16, pairs)
    read = partial(dequantize, asymmetric=scale.dtype == np.float16)
    if levels.ndim == 3:
        return np.stack([read(*one) for one in zip(levels, scale, strict=True)])
    return read(levels.T, scale.T).T if name.startswith("embedding.") else read(levels, scale)


@pytest.mark.parametrize("way", WAYS)
def test_logits_are_those_of_the_rounded_weights(run_dir, tmp_path, way):
    quantize(Quantize(checkpoint=str(run_dir), output=str(tmp_path / "small"), **WAYS[way]))
    checkpoint = open_resolved(resolve_checkpoint(str(tmp_path / "small")))
    small = {name: np.array(checkpoint.read(name)) for name in checkpoint.names()}
    experts = "decoder.layers.1.mlp.experts.fc1.weight"
    assert small[experts].shape == (6, 24 if way == "int4" else 48, 64)
    before, got = logits_of(run_dir), logits_of(tmp_path / "small")
    plain = opened(run_dir)[1].next_token_model.model
    for name, parameter in canonical_parameters(plain).items():
        parameter.set_value(rounded(name, small).astype(np.float32))
    expected = logits(plain)
    assert np.abs(expected - before).max() > 1e-3
    if way == "w8a8":  # rows are rounded as well, and a choice of experts may differ
        assert np.median(np.abs(got - expected)) < 0.05 * np.abs(expected).max()
    else:
        np.testing.assert_allclose(got, expected, rtol=0, atol=1e-4 * np.abs(expected).max())


@pytest.mark.parametrize("to", ["int8", "int4"])
def test_decoding_with_a_cache_continues_as_the_whole_pass(run_dir, tmp_path, to):
    quantize(Quantize(checkpoint=str(run_dir), output=str(tmp_path / "small"), **WAYS[to]))
    for place in (tmp_path / "small", add_adapters(tmp_path / "small", tmp_path / "adapted")):
        _, generator = opened(place)
        cached, whole = (
            GenerationConfig(decode_strategy="greedy_search", max_dec_len=16, use_cache=use)
            for use in (True, False)
        )
        assert generator.generate(PROMPTS, cached) == generator.generate(PROMPTS, whole)


@pytest.mark.parametrize(
    "options", [{"to": "int4", "method": "gptq"}, {"to": "int8", "smooth": True}], ids=["gptq", "smooth"]
)
def test_what_needs_the_inputs_of_each_expert_is_refused(run_dir, tmp_path, options):
    options = {"calibration": write_corpus(tmp_path / "text"), "samples": 8, **options}
    with pytest.raises(ConfigError) as refused:
        quantize(Quantize(checkpoint=str(run_dir), output=str(tmp_path / "small"), **options))
    assert refused.value.key == ("--smooth" if "smooth" in options else "--method")
