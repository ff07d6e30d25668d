"""Exports of quantised models: the same tokens as the model, files of the size that the bits say."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest

from ppfleetx.config.loader import load_config
from ppfleetx.config.sections.root import InferenceConfig
from ppfleetx.core.programs.generate import load_generator
from ppfleetx.core.programs.model_place import find_model
from ppfleetx.core.programs.quantize import Request, run
from ppfleetx.deploy import inference_engine
from ppfleetx.deploy.export import export
from ppfleetx.deploy.export_dir import PROGRAM_FILE, WEIGHTS_FILE, quantized_ops_file
from ppfleetx.deploy.inference_engine import InferenceEngine
from ppfleetx.distributed.context import ParallelContext
from ppfleetx.nn.cpu_ops import ops, quantized
from tests.compress.runs import MODELS, write_corpus, write_run

PROMPTS = ["the cat", "and the other hat and the cat", "the"]
WAYS = {
    ("gpt2_style", "int8"): {"to": "int8"},
    ("llama_style", "int4"): {"to": "int4", "group": 16},
    ("gpt2_style", "w8a8"): {"to": "int8", "smooth": True, "samples": 16},
}
RUNS = {
    "greedy": ["Generation.decode_strategy=greedy_search"],
    "sampling": ["Generation.decode_strategy=sampling", "Generation.top_k=7", "Generation.seed=3"],
}


@pytest.mark.parametrize(("style", "way"), WAYS)
def test_an_export_generates_what_the_quantised_model_does(style, way, tmp_path, monkeypatch) -> None:
    run_dir = write_run(tmp_path / "run", MODELS[style])
    options = dict(WAYS[style, way])
    if options.get("smooth"):
        options["calibration"] = write_corpus(tmp_path / "text")
    run(Request(checkpoint=str(run_dir), output=str(tmp_path / "small"), **options))
    plain = _export(run_dir, tmp_path / "plain")[1]
    cfg, directory = _export(tmp_path / "small", tmp_path / "out")
    sizes = [(place / WEIGHTS_FILE).stat().st_size for place in (directory, plain)]
    assert sizes[0] < 0.45 * sizes[1]
    engines = [InferenceEngine(InferenceConfig(model_dir=str(directory), cpu_threads=1))]
    if quantized.are_available() and ops.are_available():
        assert (directory / quantized_ops_file(ops.WIDTH)).is_file()
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


def _configuration(place: Path, overrides=()):
    with ExitStack() as stack:
        found = find_model(place, stack)
        return load_config(found.config, found.overrides(["Generation.max_dec_len=12", *overrides]))


def _export(place: Path, output: Path):
    cfg = _configuration(place, [f"Engine.save_load.output_dir={output}"])
    return cfg, export(cfg, ParallelContext.single())
