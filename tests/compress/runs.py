"""Tiny models as checkpoints that speak for themselves, for the tests of smaller models."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import paddle
from paddle import nn

from ppfleetx.checkpoint.config_and_tokenizer import documents_in, documents_of
from ppfleetx.checkpoint.manager import save_checkpoint
from ppfleetx.checkpoint.resolve_checkpoint import open_resolved, resolve_checkpoint
from ppfleetx.checkpoint.state_dict import load_model, model_slices
from ppfleetx.commands.generate import load_generator
from ppfleetx.commands.resolve_model import resolve_model
from ppfleetx.config.loader import load_config
from ppfleetx.config.sections.root import RunConfig
from ppfleetx.data.indexed_dataset import IndexedDatasetWriter
from ppfleetx.data.tokenizer.tokenizer import train_tokenizer
from ppfleetx.distributed.context import ParallelContext
from ppfleetx.generation.generator import Generator
from ppfleetx.models.gpt.stages import gpt_stages
from ppfleetx.models.staged_model import StagedModel
from ppfleetx.nn.layer_factory import LocalFactory
from ppfleetx.nn.quantized import with_quantized_weights
from ppfleetx.nn.stage import canonical_parameters
from tests.deploy.exports import STYLES
from tests.models.gpt_builders import build, save_network

_WIDE = {"hidden_size": 48, "ffn_hidden_size": 96}
MODELS = {name: {**STYLES[name], **_WIDE} for name in ("gpt2_style", "llama_style")}
# Latent attention, and a mixture of experts in the second layer.
DEEPSEEK = {
    **STYLES["latent_style"],
    **_WIDE,
    "latent_attention": {
        "q_rank": 24,
        "kv_rank": 16,
        "rope_head_dim": 8,
        "nope_head_dim": 8,
        "value_head_dim": 8,
    },
    "moe": {
        "num_experts": 6,
        "expert_ffn_size": 32,
        "first_dense_layers": 1,
        "router": {"score": "sigmoid", "bias": True, "num_groups": 3, "top_groups": 2},
        "shared_experts": {"ffn_size": 40, "gate": True},
    },
}


def write_run(
    directory: Path,
    model: dict[str, Any],
    compress: dict[str, Any] | None = None,
    *,
    factors: Mapping[str, float] | None = None,
) -> Path:
    """An output directory with one checkpoint of large random weights, which holds its own configuration.
    Row 5 of the parameters in ``factors`` is multiplied by these."""
    directory.mkdir(parents=True)
    tokenizer = train_tokenizer(["the cat and the hat and the other cat"] * 3, 300)
    sections = {
        "Global": {"device": "cpu", "local_batch_size": 2},
        "Model": model,
        "Compress": compress or {},
    }
    path = directory / "config.yaml"
    path.write_text(json.dumps(sections))
    cfg = load_config(path)
    large = cfg.Model.model_copy(update={"initializer_range": 0.15})
    network = build(large, 5)
    for name, factor in (factors or {}).items():
        parameter = canonical_parameters(network)[name]
        values = parameter.numpy()
        values[5] *= factor
        parameter.set_value(values)
    save_network(
        directory,
        network,
        vocab_size=cfg.Model.vocab_size,
        config=cfg.model_dump(mode="json"),
        fingerprints={"tokenizer": tokenizer.fingerprint},
        documents=documents_of(cfg, tokenizer),
    )
    return directory


def opened(place: Path, *overrides: str) -> tuple[RunConfig, Generator]:
    """A model with its configuration, as the commands load it."""
    with ExitStack() as stack:
        found = resolve_model(place, stack)
        cfg = load_config(found.config, found.overrides([*overrides]))
        return cfg, load_generator(cfg, ParallelContext.single())


def logits(model: nn.Layer) -> np.ndarray:
    """Of random tokens, ``[s, b, vocabulary]``."""
    tokens = paddle.to_tensor(np.random.default_rng(2).integers(0, 300, (3, 11)))
    with paddle.no_grad():
        return model(tokens).numpy()


def logits_of(place: Path) -> np.ndarray:
    """The same, of the model that is stored at a place."""
    return logits(opened(place)[1].next_token_model.model)


def write_corpus(prefix: Path, num_tokens: int = 4000, vocab_size: int = 300) -> str:
    """Random documents of a small vocabulary, some words of which are much more frequent."""
    rng = np.random.default_rng(3)
    tokens = (vocab_size * rng.random(num_tokens) ** 3).astype(np.int64)
    with IndexedDatasetWriter(prefix, np.uint16) as writer:
        for part in np.split(tokens, 8):
            writer.add_document(part, [len(part)])
    return str(prefix)


def add_adapters(small: Path, directory: Path) -> Path:
    """An output directory with the quantized model of ``small`` and random adapters beside its weights."""
    checkpoint = open_resolved(resolve_checkpoint(str(small)))
    cfg = load_config(checkpoint.path / "config.yaml", ["Model.lora.rank=3"])
    factory = LocalFactory()
    stages = with_quantized_weights(gpt_stages(cfg.Model, factory), cfg.Compress.Weights, factory)
    parameters = canonical_parameters(StagedModel(stages, seed=2))
    added = [name for name in parameters if ".lora." in name]
    load_model(parameters.items(), checkpoint, vocab_size=cfg.Model.vocab_size, new=added)
    rng = np.random.default_rng(6)
    for name in added:
        parameters[name].set_value(rng.normal(0, 0.3, parameters[name].shape).astype(np.float32))
    save_checkpoint(
        directory,
        epoch=0,
        step=5,
        tensors=model_slices(parameters.items()),
        state={},
        vocab_size=cfg.Model.vocab_size,
        config=cfg.model_dump(mode="json"),
        documents={**documents_in(checkpoint), **documents_of(cfg, None)},
    )
    return directory
