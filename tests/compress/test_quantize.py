"""From a checkpoint to a smaller one that does what checkpoints do; and what is refused in words."""

from __future__ import annotations

import json
import re
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import paddle
import pytest

from ppfleetx.checkpoint.adapters import merge_lora
from ppfleetx.checkpoint.model_only import read_ppfleetx, write_ppfleetx
from ppfleetx.checkpoint.resolve_checkpoint import open_resolved, resolve_checkpoint
from ppfleetx.checkpoint.slices import NUMPY_OF_DTYPE
from ppfleetx.checkpoint.weights import fitted
from ppfleetx.commands.checkpoint_verbs import Quantize
from ppfleetx.commands.generate import load_generator
from ppfleetx.commands.quantize import REPORT_FILE, quantize
from ppfleetx.commands.resolve_model import resolve_model
from ppfleetx.commands.train import find_weights, refuse_quantized_weights
from ppfleetx.compress.distill import load_teacher
from ppfleetx.compress.quantize import Options, check_options, with_group
from ppfleetx.config.errors import CheckpointError, ConfigError, UserError
from ppfleetx.config.loader import load_config
from ppfleetx.config.sections.compress import WeightsConfig
from ppfleetx.config.sections.model import ModelConfig
from ppfleetx.config.validate import section_of
from ppfleetx.conversion.convert import Conversion, convert
from ppfleetx.distributed.context import ParallelContext
from ppfleetx.nn.layer_factory import LocalFactory
from tests.compress.runs import MODELS, add_adapters, logits, logits_of, opened, write_corpus, write_run

PROMPTS = ["the cat", "and the other hat", "the"]


@pytest.fixture(scope="module", params=MODELS)
def run_dir(request, tmp_path_factory) -> Path:
    return write_run(tmp_path_factory.mktemp(request.param) / "run", MODELS[request.param])


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> str:
    return write_corpus(tmp_path_factory.mktemp("data") / "text")


GREEDY = ("Generation.max_dec_len=12", "Generation.decode_strategy=greedy_search")


def _quantize(run_dir: Path, output: Path, **options) -> dict:
    options = {"to": "int8", "samples": 16, **options}
    quantize(Quantize(checkpoint=str(run_dir), output=str(output), **options))
    return json.loads((output / REPORT_FILE).read_text())


WAYS = {
    "int8": {},
    "int8 groups": {"group": 16},
    "int8 groups, w8a8": {"group": 16, "activations": "int8"},
    "int4, w4a8": {"to": "int4", "group": 16, "activations": "int8"},
    "w8a8": {"smooth": True},
    "int4": {"to": "int4", "group": 16},
    "gptq": {"to": "int4", "group": 16, "method": "gptq"},
}


@pytest.mark.slow_after(6)
@pytest.mark.parametrize("way", WAYS)
def test_a_quantised_checkpoint_speaks_for_itself(run_dir, corpus, tmp_path, way) -> None:
    report = _quantize(run_dir, tmp_path / "small", calibration=corpus, **WAYS[way])
    bits = {layer["name"]: layer["bits"] for layer in report["layers"]}
    assert bits["decoder.layers.1.mlp.fc2"] == (4 if "to" in WAYS[way] else 8)
    assert bits["embedding.word_embeddings"] == 8
    assert all(layer["after"] < 0.4 * layer["before"] for layer in report["layers"])
    change = report["perplexity_after"] / report["perplexity_before"] - 1
    assert abs(change) < {"int8": 0.01, "int8 groups": 0.01, "w8a8": 0.03}.get(way, 0.3)
    file = "mp_00_sharding_00_pp_00/model.safetensors"
    before, after = (resolve_checkpoint(place) / file for place in (run_dir, tmp_path / "small"))
    assert after.stat().st_size < 0.45 * before.stat().st_size
    cfg, generator = opened(tmp_path / "small", *GREEDY)
    assert cfg.Compress.Weights.bits == (4 if "to" in WAYS[way] else 8)
    results = generator.generate(PROMPTS, cfg.Generation)
    alone = [generator.generate([prompt], cfg.Generation)[0] for prompt in PROMPTS]
    assert [one[0].ids for one in results] == [one[0].ids for one in alone]
    if way == "int8":
        _, original = opened(run_dir, *GREEDY)
        wanted = [one[0].ids for one in original.generate(PROMPTS, cfg.Generation)]
        assert sum(mine[0].ids[0] == ids[0] for mine, ids in zip(results, wanted, strict=True)) >= 2


@pytest.mark.parametrize(
    ("hidden", "ffn", "group", "skipped"),
    [
        (512, 2048, 32, ()),
        (576, 1536, 32, ()),
        (1600, 6400, 32, ()),
        (48, 96, 16, ()),
        (60, 240, 16, ("*.attention.qkv", "*.attention.out_proj", "*.mlp.fc1")),
    ],
)
def test_a_group_that_divides_is_chosen(hidden, ffn, group, skipped, caplog) -> None:
    sizes = {"hidden_size": hidden, "ffn_hidden_size": ffn, "num_layers": 2, "num_attention_heads": 4}
    model = section_of(ModelConfig, {"vocab_size": 300, **sizes})
    weights = with_group(model, WeightsConfig(bits=4, asymmetric=True))
    assert (weights.group_size, weights.skip, weights.asymmetric) == (group, skipped, not skipped)
    check_options(model, Options(weights))
    assert all(pattern in caplog.text for pattern in skipped)
    of_8_bits = with_group(model, WeightsConfig(bits=8, asymmetric=True))
    assert (of_8_bits.group_size, of_8_bits.asymmetric) == ((None, False) if skipped else (group, True))


@pytest.mark.parametrize("smooth", [False, True])
def test_what_is_kept_keeps_its_element_type(run_dir, corpus, tmp_path, smooth) -> None:
    source = read_ppfleetx(run_dir)
    model = section_of(ModelConfig, source.model)
    write_ppfleetx(source, fitted(source.cast("BF16"), model), model, tmp_path / "bf16")
    options = {"smooth": True, "calibration": corpus} if smooth else {}
    report = _quantize(tmp_path / "bf16", tmp_path / "small", skip=("head", "embedding.*"), **options)
    small = open_resolved(resolve_checkpoint(str(tmp_path / "small")))
    entries = {name: small.entry(name) for name in small.names()}
    quantized = {f"{layer['name']}.{part}" for layer in report["layers"] for part in ("weight", "scale")}
    kept = {name: entry for name, entry in entries.items() if name not in quantized}
    smoothed = {name for name, entry in kept.items() if entry.dtype != "BF16"}
    # SmoothQuant divides norms by factors, which 16 bits do not hold.
    assert bool(smoothed) == smooth and all("norm" in name for name in smoothed)
    sizes = {name: np.prod(e.shape) * NUMPY_OF_DTYPE[e.dtype].itemsize for name, e in entries.items()}
    assert report["kept"] == sum(sizes[name] for name in kept)
    cfg, generator = opened(tmp_path / "small", *GREEDY)
    assert generator.generate(["the"], cfg.Generation)[0][0].ids


def test_a_width_that_no_group_divides(tmp_path, caplog) -> None:
    odd = MODELS["gpt2_style"] | {"hidden_size": 60, "ffn_hidden_size": 240}
    run_dir = write_run(tmp_path / "run", odd)
    report = _quantize(run_dir, tmp_path / "small", to="int4")
    bits = {layer["name"]: layer["bits"] for layer in report["layers"] if "decoder" in layer["name"]}
    assert bits == {f"decoder.layers.{i}.mlp.fc2": 4 for i in range(odd["num_layers"])}
    cfg, generator = opened(tmp_path / "small", *GREEDY)
    assert generator.generate(["the"], cfg.Generation)[0][0].ids
    run_dir = write_run(tmp_path / "odder", odd | {"ffn_hidden_size": 100})
    with pytest.raises(ConfigError, match="use --to int8") as error:
        _quantize(run_dir, tmp_path / "none", to="int4")
    assert error.value.key == "--to" and not (tmp_path / "none").exists()


def test_gptq_leaves_a_smaller_error_than_rounding(run_dir, corpus, tmp_path) -> None:
    options = {"to": "int4", "group": 16, "calibration": corpus}
    nearest = _quantize(run_dir, tmp_path / "rtn", **options)
    better = _quantize(run_dir, tmp_path / "gptq", method="gptq", **options)
    errors = [
        np.mean([layer["output_error"] for layer in report["layers"] if layer["output_error"] is not None])
        for report in (nearest, better)
    ]
    assert errors[1] < 0.9 * errors[0]


def test_without_data_there_is_no_perplexity_and_layers_may_be_left_out(run_dir, tmp_path, capsys) -> None:
    report = _quantize(run_dir, tmp_path / "small", skip=("head", "embedding.*", "*.fc2"))
    assert report["perplexity_after"] is None and "not measured" in capsys.readouterr().out
    assert {layer["name"].rpartition(".")[2] for layer in report["layers"]} == {"qkv", "out_proj", "fc1"}
    cfg, generator = opened(tmp_path / "small", *GREEDY)
    assert generator.generate(["the"], cfg.Generation)[0][0].ids


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"to": "int4", "group": 40}, "groups of 40 do not divide the 48 input features of decoder.layers.0"),
        ({"to": "int4", "group": 12}, "multiple of 8"),
        ({"group": 16, "smooth": True, "calibration": "x"}, "is not for --smooth"),
        ({"to": "int4", "smooth": True, "calibration": "x"}, "goes with --to int8"),
        ({"method": "gptq"}, "give --calibration DATA"),
        ({"smooth": True}, "give --calibration DATA"),
        ({"calibration": "missing"}, "missing"),
    ],
)
def test_what_is_refused(run_dir, tmp_path, options, message) -> None:
    with pytest.raises(UserError, match=re.escape(message)):
        _quantize(run_dir, tmp_path / "small", **options)
    assert not any((tmp_path / "small").rglob("*.safetensors"))


def test_too_little_data(run_dir, tmp_path) -> None:
    corpus = write_corpus(tmp_path / "few", num_tokens=160)
    with pytest.raises(ConfigError, match=r"holds 160 tokens.*At least 96 tokens"):
        _quantize(run_dir, tmp_path / "small", calibration=corpus)


def test_a_weight_that_is_no_number_is_named(tmp_path) -> None:
    name = "decoder.layers.1.mlp.fc1.weight"
    run_dir = write_run(tmp_path / "run", MODELS["gpt2_style"], factors={name: np.nan})
    with pytest.raises(UserError, match=f"{name} .* NaN or infinite"):
        _quantize(run_dir, tmp_path / "small")


@pytest.mark.parametrize("style", MODELS)
def test_a_model_trained_with_quantisation_computes_what_it_was_trained_to(style, tmp_path, capsys) -> None:
    """Both round weights on the same grid, and inputs by each token's largest magnitude."""
    trained = {"enable": True, "activation_quantize_type": "abs_max"}
    run_dir = write_run(tmp_path / "run", MODELS[style], {"Quantization": trained})
    edges = ("head", "embedding.*")
    report = _quantize(run_dir, tmp_path / "small", activations="int8", skip=edges)
    assert report["on_trained_grid"] == 8
    assert "8 linears lie on the grid that training" in capsys.readouterr().out
    tokens, positions = paddle.arange(1, 21).reshape([1, 20]), paddle.arange(20).unsqueeze(0)
    models = (opened(place)[1].next_token_model for place in (run_dir, tmp_path / "small"))
    logits = [model.without_cache(tokens, positions, None).numpy() for model in models]
    np.testing.assert_allclose(*logits, atol=1e-4 * np.abs(logits[0]).max())


def test_a_quantised_model_teaches(run_dir, tmp_path) -> None:
    _quantize(run_dir, tmp_path / "small", to="int4", group=16)
    cfg, generator = opened(tmp_path / "small")
    teacher = load_teacher(str(tmp_path / "small"), cfg.Model, LocalFactory())
    expected = logits(generator.next_token_model.model)
    np.testing.assert_allclose(logits(teacher), expected, atol=1e-4 * np.abs(expected).max())


@pytest.mark.parametrize("to", ["int8", "int4"])
def test_adapters_and_the_quantised_weights_beside_them_are_merged(run_dir, tmp_path, to) -> None:
    group = {"group": 16} if to == "int4" else {}
    _quantize(run_dir, tmp_path / "small", to=to, **group)
    adapted = add_adapters(tmp_path / "small", tmp_path / "adapted")
    step = merge_lora(adapted, tmp_path / "merged")
    entries = open_resolved(resolve_checkpoint(str(step)))
    assert {entries.entry(name).dtype for name in entries.names()} == {"F32"}
    assert opened(adapted)[0].Model.lora is not None and opened(tmp_path / "merged")[0].Model.lora is None
    expected = logits_of(adapted)
    np.testing.assert_allclose(logits_of(tmp_path / "merged"), expected, atol=2e-3 * np.abs(expected).max())


def test_what_a_quantised_checkpoint_is_not(run_dir, tmp_path) -> None:
    small = tmp_path / "small"
    _quantize(run_dir, small)
    with pytest.raises(CheckpointError, match="is quantized"):
        _quantize(small, tmp_path / "again")
    with pytest.raises(CheckpointError, match=r"is quantized .* and is not converted"):
        convert(Conversion("ppfleetx", "hf", small, tmp_path / "hf"))
    with pytest.raises(ConfigError, match="exists already"):
        _quantize(run_dir, small)
    with ExitStack() as stack:
        found = resolve_model(small, stack)
        cfg = load_config(found.config, found.overrides())
        with pytest.raises(ConfigError, match="cannot be trained"):
            refuse_quantized_weights(cfg)
        plain = cfg.model_copy(update={"Compress": type(cfg.Compress)()})
        with pytest.raises(CheckpointError, match=r"is quantized .* cannot be trained"):
            load_generator(plain, ParallelContext.single())
        options = cfg.Engine.save_load.model_copy(update={"ckpt_dir": str(run_dir)})
        with pytest.raises(CheckpointError, match="is not quantized"):
            load_generator(cfg.changed("Engine", save_load=options), ParallelContext.single())
    manifest = open_resolved(resolve_checkpoint(str(small))).manifest
    assert manifest.state["source"]["quantized"]["to"] == "int8"
    assert manifest.step == find_weights(cfg, ParallelContext.single()).state.step > 0
    assert manifest.config["Compress"]["Weights"]["bits"] == 8


@pytest.fixture(scope="module", params=["inputs", "weights"])
def outlier_run(request, tmp_path_factory) -> tuple[str, Path]:
    """A model whose linear has one input that is 1000 times as large as the others, or 1000 times as large
    weights for one; what it computes is as without."""
    factor = 1000.0 if request.param == "inputs" else 1e-3
    factors = {"decoder.layers.1.mlp_norm.weight": factor, "decoder.layers.1.mlp.fc1.weight": 1 / factor}
    directory = tmp_path_factory.mktemp("outlier") / "run"
    return request.param, write_run(directory, MODELS["llama_style"], factors=factors)


def test_outlier_channels_are_named(outlier_run, corpus, tmp_path, capfd) -> None:
    where, run = outlier_run
    warned = "decoder.layers.1.mlp.fc1: rounding changes its output by "
    _quantize(run, tmp_path / "w8a8", activations="int8", calibration=corpus)
    said = "".join(capfd.readouterr())
    assert warned in said and said.count("rounding changes") == 1
    assert f"{'its input' if where == 'inputs' else 'the weights of its input'} 5 reaches" in said
    assert "What may help: --smooth" in said
    report = _quantize(run, tmp_path / "int8", calibration=corpus, group=8)
    assert (warned in "".join(capfd.readouterr())) == any(
        (one["output_error"] or 0) > 0.1 for one in report["layers"]
    )


def test_without_outliers_there_is_no_warning(run_dir, corpus, tmp_path, capfd) -> None:
    _quantize(run_dir, tmp_path / "plain", activations="int8", calibration=corpus)
    assert "rounding changes its output" not in "".join(capfd.readouterr())
    _quantize(run_dir, tmp_path / "blind", activations="int8")
    assert "nothing has measured what that changes" in "".join(capfd.readouterr())
