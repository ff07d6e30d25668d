"""Pruning while training: the schedule, what is refused, and runs that go back."""

import numpy as np
import paddle
import pytest

from ppfleetx.compress.prune_in_training import PruningInTraining
from ppfleetx.config.errors import ConfigError
from ppfleetx.config.loader import load_config
from ppfleetx.config.registries import ACTIVATIONS, ActivationTraits
from ppfleetx.config.sections.compress import PruneConfig
from tests.parity.training import CONFIG, build

ON = "Compress.Prune.enable=True"


def test_shares_follow_the_cube_between_its_two_steps():
    options = PruneConfig(enable=True, ratio=0.5, begin_step=100, end_step=350, frequency=100)
    assert [step for step in range(400) if options.is_due(step)] == [100, 200, 300, 350]
    # Zhu and Gupta (2017), equation 1, from no sparsity.
    shares = [0.5 * (1 - (1 - (step - 100) / 250) ** 3) for step in (100, 200, 300, 350)]
    assert [options.share_after(step) for step in (100, 200, 300, 350)] == pytest.approx(shares)
    assert options.share_after(99) == options.share_after(150) == 0
    assert options.share_after(299) == options.share_after(200)
    assert options.share_after(1000) == 0.5
    once = PruneConfig(enable=True, begin_step=7)
    assert [once.share_after(step) for step in (6, 7, 8)] == [0, 0.125, 0.125]
    assert [step for step in range(20) if once.is_due(step)] == [7]


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["Model.lora.rank=4"], "below adapters are not trained"),
        (["Compress.Quantization.enable=True"], "prune or quantize, one at a time"),
        (["Compress.Prune.ratio=1"], "leaves nothing"),
        (["Compress.Prune.frequency=10"], "goes with end_step"),
        (["Compress.Prune.ratio=0.001"], "removes none of 4 key/value heads and 256 feed-forward units"),
        (["Compress.Prune.ratio=0.1", "Compress.Prune.part=heads"], "removes none of 4 key/value heads$"),
        (["Model.num_query_groups=1"], "one key/value head only, which stays; set part to mlp"),
        (["Compress.Prune.begin_step=8"], "Compress.Prune.begin_step = 8.*before everything is removed"),
        (["Compress.Prune.end_step=8"], "Compress.Prune.end_step = 8.*before everything is removed"),
        (["Compress.Prune.begin_step=5", "Compress.Prune.end_step=4"], "ends before it begins"),
        (["Compress.Prune.criterion=saliency"], "l1_norm"),
    ],
)
def test_what_cannot_be_done_is_said(more, words):
    with pytest.raises(ConfigError, match=words):
        load_config(CONFIG, [ON, *more])


def test_one_head_is_no_matter_where_units_are_pruned():
    cfg = load_config(CONFIG, [ON, "Model.num_query_groups=1", "Compress.Prune.part=mlp"])
    assert cfg.Compress.pruning is not None and cfg.Model.kv_heads == 1


def test_a_run_that_goes_back_is_pruned_anew():
    found = pruning({"Compress.Prune.begin_step": 2})
    parameters = dict(found.runner.named_parameters())
    weight = parameters["decoder.layers.0.mlp.fc2.weight"]
    before = weight.numpy()
    for step in (0, 1):
        found.before_step(step)
    assert np.array_equal(weight.numpy(), before)
    found.before_step(2)
    pruned = weight.numpy()
    assert (pruned == 0).all(axis=1).sum() == 8
    weight.set_value(before)  # as a checkpoint of before step 2 does
    for step in (1, 2):
        found.before_step(step)
    assert np.array_equal(weight.numpy(), pruned)
    weight.set_value(before)
    with pytest.raises(ConfigError, match="what was pruned from layer 0 did not stay zero"):
        found.finish()


def pruning(extra):
    with paddle.utils.unique_name.guard():
        cfg, ctx, runner = build({}, 1, "gpt", "adamw", 8, {"Compress.Prune.enable": True, **extra})
        made = PruningInTraining(cfg, ctx, runner)
        made.runner = runner
        return made


@pytest.mark.parametrize(
    ("own", "gated"),
    [
        (paddle.nn.functional.softplus, False),
        (paddle.sqrt, False),
        (lambda x: paddle.nn.functional.sigmoid(x[..., : x.shape[-1] // 2]), True),
    ],
    ids=["softplus", "sqrt", "gate"],
)
def test_an_activation_that_is_not_zero_at_zero_is_refused(monkeypatch, own, gated):
    monkeypatch.setattr(ACTIVATIONS, "_entries", {**ACTIVATIONS._entries})
    ACTIVATIONS.register("own", own, traits=ActivationTraits(gated=gated))
    with pytest.raises(ConfigError, match=r"Model.hidden_act = 'own': .* would come back"):
        pruning({"Model.hidden_act": "own"})


@pytest.mark.parametrize("name", ACTIVATIONS.names())
def test_every_activation_that_ships_is_taken(name):
    pruning({"Model.hidden_act": name})
