"""Pruning: what is left computes what the whole computed without the rest; plans; words."""

import json
from dataclasses import asdict
from pathlib import Path

import numpy as np
import paddle
import pytest

from ppfleetx.checkpoint.manager import save_checkpoint
from ppfleetx.checkpoint.reader import open_checkpoint
from ppfleetx.checkpoint.reshard import reshard
from ppfleetx.checkpoint.weights import slices_of
from ppfleetx.commands.checkpoint_verbs import Prune
from ppfleetx.commands.prune import REPORT_FILE, prune
from ppfleetx.compress.prune import (
    Sizes,
    kept_of,
    magnitude_scores,
    pruned_model,
    pruned_tensors,
    sizes_after,
)
from ppfleetx.compress.saliency import saliency_scores
from ppfleetx.config.errors import UserError
from ppfleetx.config.loader import load_config
from ppfleetx.config.parallel_plan import ParallelPlan as Plan
from ppfleetx.config.sections.model import ModelConfig
from ppfleetx.models.gpt.spec import parameter_shapes
from ppfleetx.models.gpt.stages import gpt_stages
from ppfleetx.models.staged_model import StagedModel
from ppfleetx.nn.layer_factory import LocalFactory
from ppfleetx.nn.loss import token_loss
from ppfleetx.nn.stage import canonical_parameters
from tests.conversion.hf_dirs import lazy
from tests.models.gpt_builders import LLAMA_STYLE, build, random_tokens, tiny_config

CONFIG = Path(__file__).parents[2] / "ppfleetx/configs/debug/gpt_nano.yaml"
SHAPES = {"gpt": {}, "llama": LLAMA_STYLE}
IDLE = 32  # units of a layer


def make_idle(model, cfg):
    """Let one group and some units of each layer add nothing, and be small."""
    generator, parameters = np.random.default_rng(0), canonical_parameters(model)
    for index in range(cfg.num_layers):
        for reads, writes, parts, count in (
            ("attention.qkv", "attention.out_proj", cfg.kv_heads, 1),
            ("mlp.fc1", "mlp.fc2", cfg.ffn_size, IDLE),
        ):
            idle = generator.choice(parts, count, replace=False)
            into, out = (parameters[f"decoder.layers.{index}.{name}.weight"] for name in (reads, writes))
            values = out.numpy().reshape(parts, -1)
            values[idle] = 0
            out.set_value(values.reshape(out.shape))
            values = into.numpy().reshape(into.shape[0], parts, -1)
            values[:, idle] *= 1e-3
            into.set_value(values.reshape(into.shape))


@pytest.mark.parametrize("criterion", ["l1_norm", "l2_norm"])
@pytest.mark.parametrize("kind", SHAPES)
def test_without_what_is_idle_a_model_computes_the_same(kind, criterion):
    cfg = tiny_config(**SHAPES[kind], initializer_range=0.2, num_layers=3)
    model, tokens = build(cfg), random_tokens()
    for name, parameter in canonical_parameters(model).items():
        if name.endswith("bias"):
            parameter.set_value(np.random.default_rng(1).normal(0, 0.1, parameter.shape).astype(np.float32))
    make_idle(model, cfg)
    sizes = Sizes(cfg.kv_heads - 1, cfg.ffn_size - IDLE, (0, 1, 2))
    tensors = lazy({name: parameter.numpy() for name, parameter in canonical_parameters(model).items()})
    kept = {i: kept_of(magnitude_scores(tensors, cfg, i, criterion), sizes) for i in sizes.layers}
    small = pruned_model(cfg, sizes)
    left = dict(pruned_tensors(tensors, cfg, sizes, kept))
    assert {name: tensor.shape for name, tensor in left.items()} == parameter_shapes(small)
    network = build(small)
    for name, parameter in canonical_parameters(network).items():
        parameter.set_value(left[name].read())
    with paddle.no_grad():
        np.testing.assert_allclose(network(tokens).numpy(), model(tokens).numpy(), rtol=0, atol=2e-6)


def test_sizes():
    cfg = tiny_config(num_layers=4)
    assert sizes_after(cfg, 0.25, drop_layers=(1,)) == Sizes(3, 96, (0, 2, 3))
    assert sizes_after(cfg, 0.3, multiple=2) == Sizes(4, 90, (0, 1, 2, 3))
    assert sizes_after(cfg, 0.5, part="mlp") == Sizes(4, 64, (0, 1, 2, 3))
    with pytest.raises(UserError, match="leaves no key/value head"):
        sizes_after(tiny_config(num_query_groups=1), 0.5)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The same weights as one card saves them, and as ranks of a plan do."""
    place = tmp_path_factory.mktemp("saved")
    sizes = {"num_layers": 8, "num_attention_heads": 16, "head_dim": 4, "hidden_size": 32}
    sizes |= {**LLAMA_STYLE, "num_query_groups": 8, "ffn_hidden_size": 64, "vocab_size": 125}
    cfg = load_config(CONFIG, [f"Model.{key}={value}" for key, value in sizes.items()])
    generator, shapes = np.random.default_rng(3), parameter_shapes(cfg.Model)
    arrays = {
        n: (generator.normal(0, 0.2, shape) + n.endswith("norm.weight")).astype(np.float32)
        for n, shape in shapes.items()
    }
    save_checkpoint(
        place / "one",
        epoch=0,
        step=0,
        tensors=slices_of(lazy(arrays)),
        state={},
        plan=asdict(Plan()),
        config=cfg.model_dump(mode="json"),
        fingerprints={},
        vocab_size=cfg.Model.vocab_size,
    )
    reshard(place / "one", place / "sliced", Plan(mp=2, pp=2))
    reshard(place / "one", place / "cut", Plan(mp=4))
    return {name: place / name for name in ("one", "sliced", "cut")}


def test_every_plan_gives_the_same_model_bit_for_bit(saved, tmp_path):
    arrays = {}
    for name, place in saved.items():
        step = prune(Prune(checkpoint=str(place), output=str(tmp_path / name), ratio=0.25, drop_layers=(3,)))
        checkpoint = open_checkpoint(step)
        arrays[name] = {key: checkpoint.read(key) for key in checkpoint.names()}
        report = json.loads((tmp_path / name / REPORT_FILE).read_text())
        assert [layer["was"] for layer in report["layers"]] == [0, 1, 2, 4, 5, 6, 7]
        assert report["after"]["parameters"] == sum(array.size for array in arrays[name].values())
    for name in ("sliced", "cut"):
        assert arrays[name].keys() == arrays["one"].keys()
        assert all(np.array_equal(arrays[name][key], arrays["one"][key]) for key in arrays["one"])
    qkv = arrays["one"]["decoder.layers.0.attention.qkv.weight"]
    assert qkv.shape == (32, 6 * 4 * 4), "six of eight groups of two queries, a key and a value"
    assert arrays["one"]["decoder.layers.6.mlp.fc2.weight"].shape == (48, 32)


def test_saliency_is_what_the_loss_loses_to_first_order(saved):
    checkpoint = open_checkpoint(saved["one"] / "epoch_0_step_0")
    cfg = ModelConfig(**checkpoint.manifest.config["Model"])
    windows = np.random.default_rng(0).integers(0, 125, (4, 17))
    scores = saliency_scores(checkpoint, cfg, windows)[1]
    model = StagedModel(gpt_stages(cfg, LocalFactory()), seed=None)
    for name, parameter in canonical_parameters(model).items():
        parameter.set_value(checkpoint.read(name))
    model.eval()
    weight = canonical_parameters(model)["decoder.layers.1.mlp.fc2.weight"]
    tokens, labels = paddle.to_tensor(windows[:, :-1]), paddle.to_tensor(windows[:, 1:])

    def loss(factor, unit):
        values = checkpoint.read("decoder.layers.1.mlp.fc2.weight").copy()
        values[unit] *= factor
        weight.set_value(values)
        with paddle.no_grad():
            found = token_loss(model(tokens), labels, paddle.ones(labels.shape), cfg.vocab_size)
        return found.loss.item() / labels.size

    for unit in np.argsort(scores.units)[-3:]:
        slope = (loss(1.05, unit) - loss(0.95, unit)) / 0.1
        assert scores.units[unit] == pytest.approx(abs(slope), rel=0.05)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"ratio": 1.0}, "at least 0, below 1"),
        ({"ratio": -0.1}, "at least 0, below 1"),
        ({"ratio": 0.0}, "removes none of 8 key/value heads and 64 feed-forward units"),
        ({"ratio": 0.1, "multiple": 64}, "removes none .* a multiple of 64"),
        ({"ratio": 0.5, "drop_layers": (8,)}, "the model has the layers 0 to 7"),
        ({"drop_layers": tuple(range(8))}, "leaves no layer"),
        ({"ratio": 0.5, "criterion": "saliency"}, "give --calibration DATA"),
        ({"ratio": 0.5, "calibration": "x"}, "is read with --criterion saliency only"),
    ],
)
def test_what_cannot_be_done_is_said(saved, tmp_path, options, words):
    with pytest.raises(UserError, match=words):
        prune(Prune(checkpoint=str(saved["one"]), output=str(tmp_path / "out"), **options))
    assert not (tmp_path / "out").exists()
