"""Section ``Model.moe``: which layers are mixtures, and what is refused."""

import pytest

from ppfleetx.config.errors import ConfigError
from ppfleetx.config.loader import load_config
from ppfleetx.config.resume_policy import network


def load(small, moe, *more):
    return load_config(small, [f"Model.moe={moe}", *more])


@pytest.mark.parametrize(
    ("keys", "layers"),
    [
        ("", (0, 1, 2, 3)),
        ("first_dense_layers: 1", (1, 2, 3)),
        ("layer_freq: 2", (0, 2)),
        ("first_dense_layers: 1, layer_freq: 2", (1, 3)),
        ("layers: [3, 1]", (1, 3)),
    ],
)
def test_layers_that_are_mixtures(small, keys, layers):
    cfg = load(small, f"{{num_experts: 4, {keys}}}")
    assert cfg.Model.moe.mixture_layers(cfg.Model.num_layers) == layers


@pytest.mark.parametrize(
    ("moe", "key"),
    [
        ("{}", "num_experts"),
        ("{num_experts: 0}", "num_experts"),
        ("{num_experts: 4, top_k: 5}", "top_k"),
        ("{num_experts: 4, experts: 2}", "experts"),
        ("{num_experts: 4, layers: [4]}", "layers"),
        ("{num_experts: 4, layers: [1, 1]}", "layers"),
        ("{num_experts: 4, layers: []}", "layers"),
        ("{num_experts: 4, layers: [1], layer_freq: 2}", "layer_freq"),
        ("{num_experts: 4, first_dense_layers: 4}", "first_dense_layers"),
        ("{num_experts: 4, router: {score: sinkhorn}}", "router.score"),
        ("{num_experts: 4, router: {num_groups: 2}}", "router.num_groups"),
        ("{num_experts: 4, router: {top_groups: 2}}", "router.top_groups"),
        ("{num_experts: 4, router: {num_groups: 3, top_groups: 1}}", "router.num_groups"),
        ("{num_experts: 4, router: {num_groups: 2, top_groups: 3}}", "router.top_groups"),
        ("{num_experts: 4, top_k: 3, router: {num_groups: 2, top_groups: 1}}", "router.top_groups"),
        ("{num_experts: 4, router: {num_groups: 4, top_groups: 2, group_score: top2}}", "router.group_score"),
        ("{num_experts: 4, router: {jitter: 1}}", "router.jitter"),
        ("{num_experts: 4, bias_update_rate: 0.001}", "bias_update_rate"),
        ("{num_experts: 4, capacity: {factor: 1.0}}", "capacity.policy"),
        ("{num_experts: 4, capacity: {factor: 0, policy: probs}}", "capacity.factor"),
        ("{num_experts: 4, aux_loss: {kind: mean}}", "aux_loss.kind"),
        ("{num_experts: 4, shared_experts: {gate: True}}", "shared_experts.ffn_size"),
    ],
)
def test_what_is_refused_names_its_key(small, moe, key):
    with pytest.raises(ConfigError) as refused:
        load(small, moe)
    assert refused.value.key == f"Model.moe.{key}"


def test_the_network_is_the_same_however_it_is_written(small):
    one = load(
        small, "{num_experts: 4, first_dense_layers: 2, aux_loss: {weight: 0.1}, expert_ffn_size: 256}"
    )
    other = load(small, "{num_experts: 4, layers: [3, 2], router: {jitter: 0.1}}")
    assert network(one.Model) == network(other.Model)
    assert network(one.Model) != network(load(small, "{num_experts: 4, top_k: 1, layers: [2, 3]}").Model)


@pytest.mark.parametrize(
    ("more", "key"),
    [
        ("Compress.Prune.enable=True", "Compress.Prune.enable"),
        ("Model.lora={targets: ['*.mlp.fc1']}", "Model.lora.targets"),
        (
            "Compress.Quantization={enable: True, skip_layers: ['*.mlp.fc1']}",
            "Compress.Quantization.skip_layers",
        ),
    ],
)
def test_what_does_not_go_with_experts_names_its_key(small, more, key):
    with pytest.raises(ConfigError) as refused:
        load(small, "{num_experts: 4}", more)
    assert refused.value.key == key


def test_adapters_and_quantisation_know_the_linears_of_experts(small):
    patterns = "['*.experts.fc1', '*.1.mlp.fc2', '*.shared.*']"
    moe = "{num_experts: 4, layers: [0, 3], shared_experts: {ffn_size: 8}}"
    cfg = load(
        small,
        moe,
        f"Model.lora.targets={patterns}",
        f"Compress.Quantization={{enable: True, skip_layers: {patterns}}}",
    )
    linears = cfg.Model.block_linears()
    adapted = [name.removeprefix("decoder.layers.") for name in linears if cfg.Model.lora.adapts(name)]
    of_mixture = ["mlp.experts.fc1", "mlp.shared.fc1", "mlp.shared.fc2"]
    assert adapted == [f"0.{name}" for name in of_mixture] + ["1.mlp.fc2"] + [
        f"3.{name}" for name in of_mixture
    ]
    rounded = {name for name in linears if cfg.Compress.Quantization.quantizes(name, "Linear")}
    assert rounded == {name for name in linears if not cfg.Model.lora.adapts(name)}
