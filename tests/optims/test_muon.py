"""Muon against float64 goldens (``tests/goldens/make_muon_goldens.py``), and parameter groups."""

import json
from pathlib import Path

import numpy as np
import paddle
import pytest

from ppfleetx.commands.check import check_report
from ppfleetx.config.errors import ConfigError
from ppfleetx.config.loader import load_config
from ppfleetx.config.sections.model import ModelConfig
from ppfleetx.config.sections.optimizer import MuonConfig, OptimizerConfig
from ppfleetx.core.module.gpt import GPTModule
from ppfleetx.distributed.context import ParallelContext
from ppfleetx.models.gpt.spec import parameter_specs
from ppfleetx.nn.attention_spec import qkv_parts
from ppfleetx.nn.cpu_ops import bfloat16
from ppfleetx.nn.mlp_spec import GATE_AND_UP
from ppfleetx.nn.param_spec import ParamSpec
from ppfleetx.nn.stage import declare
from ppfleetx.optims.build import build_optimizer
from ppfleetx.optims.muon import Muon, newton_schulz
from ppfleetx.optims.param_groups import group_rows
from ppfleetx.optims.rule import ParamView
from ppfleetx.parallel.parallelize import parallelize

GOLDENS = np.load(Path(__file__).parents[1] / "goldens" / "muon.npz")
CASES = sorted({key.split("/")[0] for key in GOLDENS.files} - {"ns"})
SIZES = {"vocab_size": 64, "hidden_size": 16, "num_layers": 3, "num_attention_heads": 2}
SIZES["max_position_embeddings"] = 8
MODEL = ModelConfig(**SIZES)


def of_paddle(array, options):
    """The goldens' ``[..., out, in]`` as ``[..., in, out]``, with gate and up in pairs."""
    if options.get("split") == "gate_up":
        gate, up = np.split(array, 2, axis=-2)
        array = np.stack([gate, up], axis=-2).reshape(array.shape)
    return np.swapaxes(array, -1, -2).astype(np.float32)


def spec_of(options, shape):
    parts = ()
    if options.get("split") in ("three", "heads"):
        parts = qkv_parts(options["per"], options["d"])
    elif options.get("split") == "gate_up":
        parts = GATE_AND_UP
    return ParamSpec(tuple(shape), parts=parts, name="decoder.layers.0.w")


@pytest.mark.parametrize("case", CASES)
def test_five_steps_equal_the_goldens(case):
    options = json.loads(str(GOLDENS[f"{case}/options"]))
    start, gradients, end, momentum = (
        of_paddle(GOLDENS[f"{case}/{key}"], options) for key in ["w0", "g", "w", "m"]
    )
    muon = MuonConfig(
        momentum=options["mu"],
        nesterov=options.get("nesterov", True),
        scale=options["scale"],
        coefficients=options.get("table", "simple"),
        split={"heads": "heads", None: "none"}.get(options.get("split"), "parts"),
        epsilon=options["eps"],
    )
    rule = Muon(OptimizerConfig(name="Muon", muon=muon))
    value, state = paddle.to_tensor(start), paddle.zeros(start.shape)
    for lr, gradient in zip(options["lr"], gradients, strict=True):
        view = ParamView(
            "w", spec_of(options, start.shape), value, paddle.to_tensor(gradient), {"momentum": state}
        )
        rule.update([view], lr=lr, weight_decay=options["wd"])
    np.testing.assert_allclose(value.numpy(), end, atol=1e-5 * max(1.0, np.abs(end - start).max()))
    np.testing.assert_allclose(state.numpy(), momentum, rtol=1e-5, atol=1e-6)
    if f"{case}/bf16" in GOLDENS:  # torch.optim.Muon iterates in bfloat16
        theirs = of_paddle(GOLDENS[f"{case}/bf16"], options)
        assert np.abs(value.numpy() - theirs).max() < 0.02 * np.abs(end - start).max()


@pytest.mark.parametrize("key", [key for key in GOLDENS.files if key.startswith("ns/") and "_" in key])
def test_newton_schulz_equals_the_goldens(key):
    table, steps = key.removeprefix("ns/").rsplit("_", 1)
    matrix = paddle.to_tensor(GOLDENS["ns/x"])
    made = newton_schulz(matrix, int(steps), table, 1e-7)
    np.testing.assert_allclose(made.numpy(), GOLDENS[key], atol=1e-12)
    batch = newton_schulz(paddle.stack([2 * matrix, matrix]), int(steps), table, 1e-7)
    np.testing.assert_allclose(batch[1].numpy(), GOLDENS[key], atol=1e-12)


@pytest.mark.skipif(not bfloat16.are_available(), reason="this CPU has no bfloat16 products")
def test_newton_schulz_in_bfloat16():
    matrix = paddle.to_tensor(GOLDENS["ns/x"].astype(np.float32))
    exact, low = (newton_schulz(matrix, 5, "simple", 1e-7, in_bfloat16=low).numpy() for low in (False, True))
    assert low.dtype == np.float32
    assert 1e-4 < np.linalg.norm(low - exact) / np.linalg.norm(exact) < 0.02


def made(cfg, model=MODEL):
    """An optimizer over all parameters of a model, after one step at rate 0.1 with values and gradients of
    1."""
    params = []
    for name, spec in parameter_specs(model).items():
        parameter = paddle.create_parameter(list(spec.shape), "float32")
        parameter.set_value(paddle.ones(spec.shape))
        declare(parameter, spec)
        parameter.grad = paddle.ones(spec.shape)
        params.append((name, parameter))
    optimizer = build_optimizer(cfg, params, num_layers=model.num_layers)
    optimizer.step(0.1)
    return dict(params), optimizer


def test_matrices_move_by_muon_and_the_rest_by_adamw():
    _, optimizer = made(OptimizerConfig(name="Muon"))
    states = {}
    for name, state in optimizer.state():
        states.setdefault(state, set()).add(name)
    assert "decoder.layers.1.attention.qkv.weight" in states["momentum"]
    assert states["momentum"].isdisjoint(states["moment1"])
    assert {name.rsplit(".", 2)[1] for name in states["momentum"]} == {"qkv", "out_proj", "fc1", "fc2"}
    assert "embedding.word_embeddings.weight" in states["moment1"]


def test_groups_have_their_own_rate_decay_and_optimizer():
    cfg = OptimizerConfig(
        name="SGD",
        weight_decay=0.0,
        groups=[
            {"parameters": "decoder.layers.*.mlp.*", "lr_factor": 0.5},
            {"kinds": ["norm"], "optimizer": "AdamW", "weight_decay": 0.5},
        ],
    )
    params, optimizer = made(cfg)
    first = lambda name: float(params[name].flatten()[0])  # noqa: E731
    assert first("decoder.layers.0.mlp.fc1.weight") == pytest.approx(1 - 0.05)
    assert first("decoder.layers.0.attention.qkv.weight") == pytest.approx(1 - 0.1)
    assert first("decoder.final_norm.weight") == pytest.approx(1 - 0.1 * 0.5 - 0.1, rel=1e-5)
    assert {name for name, _ in optimizer.state()} == {
        name for name in params if "norm" in name and not name.endswith("bias")
    }


def test_layers_have_rates_that_fall_towards_the_input():
    params, _ = made(OptimizerConfig(name="SGD", layer_decay=0.5))
    moved = {name: 1 - float(parameter.flatten()[0]) for name, parameter in params.items()}
    blocks = [moved[f"decoder.layers.{i}.mlp.fc1.weight"] for i in range(3)]
    assert blocks == pytest.approx([0.1 / 8, 0.1 / 4, 0.1 / 2], rel=1e-4)
    assert moved["embedding.word_embeddings.weight"] == pytest.approx(0.1 / 16, rel=1e-4)
    assert moved["decoder.final_norm.weight"] == pytest.approx(0.1, rel=1e-4)


@pytest.mark.parametrize(
    ("given", "lora", "key"),
    [
        ({"groups": [{"parameters": "decoder.layer.*"}]}, None, "groups.0"),
        ({"groups": [{"parameters": ["*.mlp.*", "decoder.layer.*"]}]}, None, "groups.0.parameters"),
        ({"groups": [{"kinds": ["word_embedding"], "optimizer": "Muon"}]}, None, "groups.0.optimizer"),
        ({"name": "Muon", "groups": [{"kinds": ["matrix"], "optimizer": "SGD"}]}, None, "name"),
        ({"name": "Muon"}, {"rank": 2}, "name"),
    ],
)
def test_what_updates_nothing_is_refused_by_its_key(given, lora, key):
    specs = parameter_specs(ModelConfig(**SIZES, lora=lora)).values()
    with pytest.raises(ConfigError) as found:
        group_rows(OptimizerConfig(**given), specs)
    assert found.value.key == f"Optimizer.{key}"


def test_rows_of_groups():
    specs = parameter_specs(MODEL).values()
    rows = group_rows(OptimizerConfig(name="Muon", groups=[{"kinds": ["norm"], "lr_factor": 2}]), specs)
    assert [(row.name, row.optimizer) for row in rows] == [
        ("Optimizer.groups.0", "AdamW"),
        ("others", "Muon"),
        ("others", "AdamW"),
    ]
    assert sum(len(row.names) for row in rows) == len(list(specs))


@pytest.mark.parametrize(
    ("groups", "words"),
    [
        ("[{kinds: [head]}]", r"groups\.0 = 'head' \(-o override 1\): matches no trainable parameter$"),
        ("[{parameters: '*'}, {kinds: [bias]}]", r"groups\.1 = 'bias' \(-o override 1\): .* earlier group"),
        ("[{kinds: [bias], optimizer: SGD, beta2: 0.5}]", r"groups\.0\.beta2 = 0\.5 \(-o override 1\): "),
    ],
)
def test_a_wrong_group_is_shown_with_its_place(groups, words):
    with pytest.raises(ConfigError, match=words):
        check_report(load_config("debug/gpt_nano", [f"Optimizer.groups={groups}"]))


def test_a_group_of_all_parameters_is_shown_with_its_settings():
    cfg = load_config("debug/gpt_nano", ["Optimizer.groups=[{parameters: '*', lr_factor: 0.5}]"])
    assert "AdamW, lr_factor 0.5: 28 parameters" in check_report(cfg)


def test_the_table_of_groups_is_the_same_for_the_configuration_that_a_run_writes():
    """It gives every key of a group, null where the group leaves it out."""
    specs = parameter_specs(MODEL).values()
    cfg = OptimizerConfig(groups=[{"kinds": ["norm"], "lr_factor": 0.5}, {"kinds": ["bias"], "beta2": 0.9}])
    rows = group_rows(OptimizerConfig(**cfg.model_dump(mode="json")), specs)
    assert [row.settings for row in rows] == ["lr_factor 0.5", "beta2 0.9", ""]
    assert rows == group_rows(cfg, specs)


@pytest.mark.parametrize(
    "given",
    [
        {"name": "Muon", "muon": {"coefficients": "polar_express"}},
        {"name": "Muon", "muon": {"coefficients": "quintic", "steps": 6}},
        {"groups": [{"lr_factor": 2}]},
        {"layer_decay": 0},
    ],
)
def test_settings_that_make_no_sense_are_refused(given):
    with pytest.raises(ValueError):
        OptimizerConfig(**given)


@pytest.mark.parametrize(
    "group",
    [{"kinds": ["norm"], "optimizer": "SGD", "beta1": 0.5}, {"kinds": ["norm"], "weight_decay": 0.1}],
)
def test_a_group_has_no_setting_that_its_optimizer_does_not_read(group):
    with pytest.raises(ValueError, match="is not read by SGD"):
        OptimizerConfig(name="SGD", groups=[group])


def test_training_refuses_it_too():
    cfg = load_config("debug/gpt_nano", ["Optimizer.name=Muon", "Model.lora={rank: 2}"])
    with pytest.raises(ConfigError) as found:
        parallelize(GPTModule(cfg), cfg, ParallelContext.single(), train=True)
    assert found.value.key == "Optimizer.name"


def test_check_names_every_parameter_of_a_group():
    group = "{parameters: [decoder.layers.0.mlp.*, decoder.layers.2.mlp.*, decoder.layers.3.mlp.*]}"
    keys = ["Optimizer.name=Muon", f"Optimizer.groups=[{group}]", "Model.num_layers=4"]
    report = check_report(load_config("debug/gpt_nano", keys))
    lines = [line.strip() for line in report[report.index("optimizer ") :].splitlines()]
    assert lines[0].endswith("Muon: 6 parameters of 98.3 K (Optimizer.groups.0)")
    assert lines[1:3] == [f"decoder.layers.0,2-3.mlp.{name}.weight" for name in ("fc1", "fc2")]
    others = lines[next(n for n, line in enumerate(lines) if line.startswith("Muon") and "others" in line) :]
    assert "decoder.layers.1.mlp.fc1.weight" in others and "decoder.layers.0-3.attention.qkv.weight" in others
    assert "embedding.word_embeddings.weight" in others
