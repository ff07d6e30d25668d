"""Whole experts are removed: without those that no token uses the model is the same; what is refused."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from ppfleetx.checkpoint.model_only import save_weights
from ppfleetx.checkpoint.resolve_checkpoint import open_resolved, resolve_checkpoint
from ppfleetx.checkpoint.weights import slices_of
from ppfleetx.commands.checkpoint_verbs import Prune, open_model
from ppfleetx.commands.prune import REPORT_FILE, prune
from ppfleetx.commands.resolve_model import resolve_model
from ppfleetx.commands.train import evaluate, train
from ppfleetx.config.errors import ConfigError
from ppfleetx.config.loader import load_config
from ppfleetx.config.sections.root import RunConfig
from ppfleetx.distributed.context import ParallelContext
from tests.compress.runs import DEEPSEEK, logits_of, write_corpus, write_run
from tests.conversion.hf_dirs import lazy
from tests.deploy.exports import GPT2_STYLE

SOFTMAX = {**GPT2_STYLE, "moe": {"num_experts": 6, "expert_ffn_size": 40, "aux_loss": {"kind": "switch"}}}
GROUPS = {"score": "sigmoid", "bias": True, "num_groups": 3, "top_groups": 2, "group_score": "max"}
MODELS = {
    "softmax": SOFTMAX,
    "not_normalized": {**SOFTMAX, "moe": {**SOFTMAX["moe"], "router": {"normalize": False}}},
    "deepseek": {**DEEPSEEK, "moe": {**DEEPSEEK["moe"], "router": GROUPS}},
}
IDLE = {"softmax": (0, 3), "not_normalized": (4, 5), "deepseek": (1, 2, 5)}  # of the last, one of each group


def configuration(place: Path, *overrides: str) -> RunConfig:
    with ExitStack() as stack:
        found = resolve_model(place, stack)
        return load_config(found.config, found.overrides([*overrides]))


def write_idle(directory: Path, name: str) -> Path:
    """A run in which no token chooses the experts ``IDLE``."""
    run_dir = write_run(directory / "whole", MODELS[name])
    checkpoint = open_resolved(resolve_checkpoint(str(run_dir)))
    with open_model(Prune(checkpoint=str(run_dir), output="")) as (cfg, _, tokenizer):
        pass
    arrays = {own: np.array(checkpoint.read(own)) for own in checkpoint.names()}
    for own, array in arrays.items():
        if own.endswith("mlp.router.bias"):
            array[list(IDLE[name])] = -9.0
        elif own.endswith("mlp_norm.bias"):
            array[:] = 1.0
        elif own.endswith("mlp.router.weight") and not cfg.Model.moe.router.bias:
            array[:, IDLE[name]] = -1.0  # the sum of a layer norm's output with these biases is the width
    save_weights(directory / "run", cfg, slices_of(lazy(arrays)), tokenizer=tokenizer, source={})
    return directory / "run"


def share(ratio: float, **options: object) -> dict[str, object]:
    return {"part": "experts", "ratio": ratio, **options}


@pytest.fixture(scope="module", params=MODELS)
def idle(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path, str]:
    place = tmp_path_factory.mktemp(request.param)
    return request.param, write_idle(place, request.param), write_corpus(place / "text")


def test_without_experts_that_no_token_uses_the_logits_are_the_same(idle, tmp_path, capsys) -> None:
    name, run_dir, corpus = idle
    options = share(len(IDLE[name]) / 6, criterion="usage", calibration=corpus, samples=8)
    prune(Prune(checkpoint=str(run_dir), output=str(tmp_path / "fewer"), **options))
    before, after = logits_of(run_dir), logits_of(tmp_path / "fewer")
    np.testing.assert_allclose(after, before, rtol=0, atol=1e-6 * np.abs(before).max())
    model, said = configuration(tmp_path / "fewer").Model, capsys.readouterr().out
    assert model.moe.num_experts == 6 - len(IDLE[name])
    report = json.loads((tmp_path / "fewer" / REPORT_FILE).read_text())
    assert report["after"]["parameters"] < report["before"]["parameters"]
    assert [one["layer"] for one in report["layers"]] == list(model.moe.mixture_layers(2))
    for one in report["layers"]:
        assert tuple(one["removed"]) == IDLE[name]
        assert sorted(one["removed"] + one["kept"]) == list(range(6))
        assert all((one["shares"][expert] > 0) == (expert in one["kept"]) for expert in range(6))
        assert sum(one["shares"]) == pytest.approx(1)
        gone = ", ".join(f"{expert} (0.00%)" for expert in IDLE[name])
        assert f"layer {one['layer']}: removed experts and their shares of the routed weight: {gone}" in said


def test_the_result_trains_and_evaluates(idle, tmp_path) -> None:
    name, run_dir, corpus = idle
    small = tmp_path / "fewer"
    prune(Prune(checkpoint=str(run_dir), output=str(small), **share(0.5)))
    dataset = f"{{input_dir: {corpus}, max_seq_len: 32, split: [8, 2, 0]}}"
    trained = tmp_path / "trained"
    data = [f"Data.Train.dataset={dataset}", f"Data.Eval.dataset={dataset}", "Engine.eval_iters=2"]
    steps = ["Engine.max_steps=2", "Engine.eval_freq=0", "Optimizer.lr.max_lr=0.01"]
    overrides = [*data, *steps, f"Engine.save_load.output_dir={trained}"]
    with ExitStack() as stack:
        written = resolve_model(small, stack).config
        cfg = load_config(written, [*overrides, f"Engine.save_load.init_from={small}"])
    assert cfg.Model.moe.num_experts == 3
    if name == "softmax":
        checkpoint = open_resolved(resolve_checkpoint(str(small)))
        shares = checkpoint.read("decoder.layers.0.mlp.router.load")
        np.testing.assert_allclose(shares, np.full(3, 1 / 3), rtol=1e-6)
    losses = [evaluate(configuration(small, *overrides), ParallelContext.single())[0].loss]
    train(cfg, ParallelContext.single())
    losses.append(evaluate(configuration(trained, *overrides), ParallelContext.single())[0].loss)
    assert losses[1] < losses[0]


def test_without_samples_the_router_decides(tmp_path) -> None:
    """Experts whose rows of the router are small go; with groups, as many of each."""
    run_dir = write_run(tmp_path / "run", MODELS["deepseek"])
    checkpoint = open_resolved(resolve_checkpoint(str(run_dir)))
    weight = checkpoint.read("decoder.layers.1.mlp.router.weight")
    for criterion, power in (("l1_norm", 1), ("l2_norm", 2)):
        place = tmp_path / criterion
        prune(Prune(checkpoint=str(run_dir), output=str(place), **share(0.5, criterion=criterion)))
        mass = (np.abs(weight.astype(np.float64)) ** power).sum(0)
        expected = [2 * group + int(mass[2 * group] < mass[2 * group + 1]) for group in range(3)]
        [layer] = json.loads((place / REPORT_FILE).read_text())["layers"]
        assert layer["kept"] == expected
        np.testing.assert_allclose(layer["shares"], mass / mass.sum())
        small = open_resolved(resolve_checkpoint(str(place)))
        for own, axis in (("router.weight", 1), ("router.bias", 0), ("experts.fc1.weight", 0)):
            old, new = (one.read(f"decoder.layers.1.mlp.{own}") for one in (checkpoint, small))
            np.testing.assert_array_equal(new, old.take(expected, axis))


@pytest.mark.parametrize(
    ("model", "options", "words"),
    [
        ({}, share(0.5), r"--part = 'experts': the model has no mixtures"),
        (SOFTMAX, share(0.0), r"removes none of 6 experts"),
        (SOFTMAX, share(0.2, multiple=3), r"removes none of 6 experts, .* multiple of 3"),
        (SOFTMAX, share(0.9), r"leaves 1 of 6 experts: a position cannot choose 2 of 1"),
        (MODELS["deepseek"], share(0.4), r"leaves 4 of 6 experts: 4 experts do not divide into 3 groups"),
        (DEEPSEEK, share(0.5), r"leaves 3 of 6 experts: a group has one expert only"),
        (SOFTMAX, share(1.0), r"at least 0, below 1"),
        (SOFTMAX, share(0.5, drop_layers=(0,)), r"--drop-layers.* does not go with --part experts"),
        (SOFTMAX, share(0.5, criterion="usage"), r"--criterion.* give --calibration"),
        (SOFTMAX, share(0.5, criterion="saliency"), r"does not measure experts; .* usage"),
        ({}, {"ratio": 0.5, "criterion": "usage"}, r"does not measure heads and units; .* saliency"),
        (SOFTMAX, {"ratio": 0.5}, r"ppfleetx prune --part experts"),
    ],
)
def test_what_cannot_be_done_is_said(model, options, words, tmp_path) -> None:
    run_dir = write_run(tmp_path / "run", {**GPT2_STYLE, **model})
    with pytest.raises(ConfigError, match=words):
        prune(Prune(checkpoint=str(run_dir), output=str(tmp_path / "out"), **options))
    assert not (tmp_path / "out").exists()
