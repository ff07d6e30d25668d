"""Exports of quantized models: the same tokens as the model, files of the size that the bits say."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from ppfleetx.commands.checkpoint_verbs import Quantize
from ppfleetx.commands.generate import load_generator
from ppfleetx.commands.quantize import quantize
from ppfleetx.commands.resolve_model import resolve_model
from ppfleetx.commands.train import evaluate
from ppfleetx.config.errors import ConfigError
from ppfleetx.config.loader import load_config
from ppfleetx.config.sections.root import InferenceConfig
from ppfleetx.deploy import inference_engine
from ppfleetx.deploy.export import check_adapters, export
from ppfleetx.deploy.export_dir import BLOCKS_FILE, PROGRAM_FILE, QUANTIZED_OPS_FILE, WEIGHTS_FILE
from ppfleetx.deploy.inference_engine import InferenceEngine
from ppfleetx.deploy.server.app import Service
from ppfleetx.distributed.context import ParallelContext
from ppfleetx.nn.cpu_ops import fused_blocks
from tests.compress.runs import DEEPSEEK, MODELS, add_adapters, write_corpus, write_run
from tests.deploy.server.in_process import serve

PROMPTS = ["the cat", "and the other hat and the cat", "the"]
WAYS = {
    ("gpt2_style", "int8"): {"to": "int8"},
    ("gpt2_style", "w8a8"): {"to": "int8", "smooth": True, "samples": 16},
    ("windowed", "int4"): {"to": "int4", "group": 16},
    ("deepseek", "int4"): {"to": "int4", "group": 8},
}
STYLES = {**MODELS, "windowed": {**MODELS["llama_style"], "attention_window": 3}, "deepseek": DEEPSEEK}
RUNS = {
    "greedy": ["Generation.decode_strategy=greedy_search"],
    "sampling": ["Generation.decode_strategy=sampling", "Generation.top_k=7", "Generation.seed=3"],
}


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(("style", "way"), WAYS)
def test_an_export_generates_what_the_quantised_model_does(style, way, tmp_path, monkeypatch) -> None:
    run_dir = write_run(tmp_path / "run", STYLES[style])
    options = dict(WAYS[style, way])
    if options.get("smooth"):
        options["calibration"] = write_corpus(tmp_path / "text")
    quantize(Quantize(checkpoint=str(run_dir), output=str(tmp_path / "small"), **options))
    cfg, directory = _export(tmp_path / "small", tmp_path / "out")
    if (style, way) == ("gpt2_style", "int8"):  # an export takes seconds
        plain = _export(run_dir, tmp_path / "plain")[1]
        sizes = [(place / WEIGHTS_FILE).stat().st_size for place in (directory, plain)]
        assert sizes[0] < 0.45 * sizes[1]
    engines = [InferenceEngine(InferenceConfig(model_dir=str(directory), cpu_threads=1))]
    if fused_blocks.all_are_available():
        faster = QUANTIZED_OPS_FILE if style == "deepseek" else BLOCKS_FILE  # which knows no experts
        assert (directory / faster).is_file()
        monkeypatch.setattr(inference_engine, "_program_file", lambda *_: PROGRAM_FILE)
        engines.append(InferenceEngine(InferenceConfig(model_dir=str(directory), cpu_threads=1)))
    generator = load_generator(cfg, ParallelContext.single())
    for name, overrides in RUNS.items():
        generation = _configuration(tmp_path / "small", overrides).Generation
        expected = generator.generate(PROMPTS, generation)
        alone = generator.generate(PROMPTS[:1], generation)
        for engine in engines:
            assert engine.generate(PROMPTS, generation) == expected, name
            assert engine.generate(PROMPTS[:1], generation) == alone, name


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    "keys",
    [
        {"activation_quantize_type": "abs_max", "weight_quantize_type": "channel_wise_abs_max"},
        {},  # the inputs' scales are 0, as of layers that saw no input: inputs are not rounded
    ],
)
def test_an_export_of_a_model_trained_with_quantization_rounds_as_it_does(keys, tmp_path) -> None:
    compress = {"Quantization": {"enable": True, "weight_bits": 4, **keys}}
    run_dir = write_run(tmp_path / "run", MODELS["gpt2_style"], compress)
    cfg, directory = _export(run_dir, tmp_path / "out", "Engine.save_load.allow_missing=True")
    engine = InferenceEngine(InferenceConfig(model_dir=str(directory), cpu_threads=1))
    expected = load_generator(cfg, ParallelContext.single()).generate(PROMPTS, cfg.Generation)
    assert engine.generate(PROMPTS, cfg.Generation) == expected


def test_evaluation_and_server_use_the_small_weights(tmp_path) -> None:
    """Losses of float32 and of 8 bits, and answers of the server and of the generator."""
    run_dir, corpus = write_run(tmp_path / "run", MODELS["gpt2_style"]), write_corpus(tmp_path / "text")
    small = tmp_path / "small"
    quantize(Quantize(checkpoint=str(run_dir), output=str(small), to="int8"))
    dataset = f"{{input_dir: {corpus}, max_seq_len: 32, split: [0, 100, 0]}}"
    data = [f"Data.Eval.dataset={dataset}", "Engine.eval_iters=4"]
    losses = []
    for place in (run_dir, small):
        cfg = _configuration(place, [*data, f"Engine.save_load.output_dir={tmp_path / 'evaluated'}"])
        losses.append(evaluate(cfg, ParallelContext.single())[0].loss)
    assert 0 < abs(losses[1] / losses[0] - 1) < 0.01

    cfg = _configuration(small, RUNS["greedy"])
    generator = load_generator(cfg, ParallelContext.single())
    expected = [one[0].text for one in generator.generate(PROMPTS, cfg.Generation)]

    async def use(client: httpx.AsyncClient, _: Service) -> None:
        body = {"prompt": PROMPTS, "temperature": 0, "max_tokens": 12}
        answer = (await client.post("/v1/completions", json=body)).json()
        assert [choice["text"] for choice in answer["choices"]] == expected

    serve(generator, cfg.Serve, use)


def test_adapters_beside_small_weights_are_not_exported(tmp_path) -> None:
    run_dir = write_run(tmp_path / "run", MODELS["gpt2_style"])
    quantize(Quantize(checkpoint=str(run_dir), output=str(tmp_path / "small"), to="int8"))
    cfg = _configuration(add_adapters(tmp_path / "small", tmp_path / "adapted"))
    with pytest.raises(ConfigError, match=r"adapters to quantized weights.*ppfleetx merge"):
        check_adapters(cfg)


def _configuration(place: Path, overrides=()):
    with ExitStack() as stack:
        found = resolve_model(place, stack)
        return load_config(found.config, found.overrides(["Generation.max_dec_len=12", *overrides]))


def _export(place: Path, output: Path, *overrides: str):
    cfg = _configuration(place, [f"Engine.save_load.output_dir={output}", *overrides])
    ctx = ParallelContext.single()
    return cfg, export(cfg, ctx, load_generator(cfg, ctx))
