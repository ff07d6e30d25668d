"""Tiny models as checkpoints and exported, for the tests of export and inference."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ppfleetx.checkpoint.slices import TensorSlice
from ppfleetx.checkpoint.state_dict import model_slices
from ppfleetx.commands.generate import load_generator
from ppfleetx.config.loader import load_config
from ppfleetx.config.sections.root import InferenceConfig, ModelConfig, RunConfig
from ppfleetx.data.tokenizer.json_files import END_OF_DOCUMENT
from ppfleetx.data.tokenizer.tokenizer import train_tokenizer
from ppfleetx.deploy.export import export
from ppfleetx.deploy.inference_engine import InferenceEngine
from ppfleetx.distributed.context import ParallelContext
from ppfleetx.generation.generator import Generator
from tests.generation import conftest
from tests.models.gpt_builders import build, save_network

GPT2_STYLE = {
    "vocab_size": 300,
    "hidden_size": 32,
    "num_layers": 2,
    "num_attention_heads": 4,
    "ffn_hidden_size": 128,
    "max_position_embeddings": 64,
}
LLAMA_STYLE = {**GPT2_STYLE, **conftest.LLAMA_STYLE}
LATENT_STYLE = {
    **{key: value for key, value in LLAMA_STYLE.items() if key != "num_query_groups"},
    "latent_attention": conftest.DEEPSEEK_STYLE["latent_attention"],
}
STYLES = {"gpt2_style": GPT2_STYLE, "llama_style": LLAMA_STYLE, "latent_style": LATENT_STYLE}


def write_run(directory: Path, model: dict[str, Any], tokenizer_size: int | None = None) -> Path:
    """An output directory of training: one checkpoint, cut up as two tensor-parallel ranks save it, and a
    tokenizer of fewer ids than the model, or of ``tokenizer_size``. Weights are large, so that the likeliest
    token changes often."""
    cfg = ModelConfig(**model, initializer_range=0.3)
    network = build(cfg, 5)
    special = [END_OF_DOCUMENT]
    if tokenizer_size is not None:
        special += [f"<{number}>" for number in range(tokenizer_size - 271)]  # 271: what these texts give
    texts = ["the cat and the hat and the other cat"] * 3
    tokenizer = train_tokenizer(texts, 299 + len(special), special_tokens=special)
    named = [(parameter.info.name, parameter) for parameter in network.parameters()]
    save_network(
        directory,
        network,
        tensors=_halves(model_slices(named)),
        vocab_size=cfg.vocab_size,
        fingerprints={"tokenizer": tokenizer.fingerprint},
    )
    tokenizer.save(directory / "tokenizer")
    return directory


def _halves(slices: Iterator[TensorSlice]) -> Iterator[TensorSlice]:
    for whole in slices:
        if len(whole.shape) < 2 or whole.shape[-1] % 2:
            yield whole
            continue
        width = whole.shape[-1] // 2
        for start in (0, width):
            offset = (*whole.offset[:-1], start)
            part = whole.array()[..., start : start + width]
            yield replace(whole, offset=offset, shape=part.shape, data=part)


def configuration(run: Path, model: dict[str, Any], *overrides: str) -> RunConfig:
    sections = {
        "Global": {"device": "cpu", "local_batch_size": 2},
        "Model": model,
        "Engine": {"save_load": {"ckpt_dir": str(run), "output_dir": str(run.parent / "out")}},
    }
    path = run.parent / "pretrain.yaml"
    path.write_text(json.dumps(sections))
    return load_config(path, overrides)


@dataclass
class Exported:
    """A checkpoint's generator and the engine of its export."""

    run: Path
    directory: Path
    generator: Generator
    engine: InferenceEngine


def make_export(
    tmp_path: Path, model: dict[str, Any], *overrides: str, tokenizer_size: int | None = None
) -> Exported:
    run = write_run(tmp_path / "run", model, tokenizer_size)
    cfg, ctx = configuration(run, model, *overrides), ParallelContext.single()
    generator = load_generator(cfg, ctx)
    directory = export(cfg, ctx, generator)
    engine = InferenceEngine(InferenceConfig(model_dir=str(directory), cpu_threads=1))
    return Exported(run, directory, generator, engine)
