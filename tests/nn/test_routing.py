"""Routers against the float64 goldens of ``tests/goldens/make_moe_router.py``."""

import json
from pathlib import Path

import numpy as np
import paddle
import pytest

from ppfleetx.config.sections.moe import RouterConfig
from ppfleetx.nn import routing

GOLDENS = np.load(Path(__file__).parents[1] / "goldens" / "moe_router.npz")
LENGTH, BATCH, WIDTH, EXPERTS, TOP_K = GOLDENS["shape"].tolist()
EQUAL = {"rtol": 1e-5, "atol": 1e-6}
ROUTERS = [
    *("softmax_topk_norm", "softmax_topk", "topk_softmax", "softmax_topk_scaled", "sigmoid_norm"),
    *("sigmoid_top1_hf", "sigmoid_top1_megatron", "deepseek_v3", "deepseek_v2", "switch_paddle"),
    *("capacity_probs", "capacity_position", "capacity_pad"),
]


@pytest.fixture
def logits():
    """Hidden states and matrix of the goldens as leaves, and the logits."""
    x, w = (paddle.to_tensor(GOLDENS[name].astype("float32"), stop_gradient=False) for name in "xw")
    return x, w, lambda: x.matmul(w, transpose_y=True)


def section(options):
    """The configuration section for a golden's options."""
    groups = (
        {"num_groups": options["groups"], "top_groups": options["group_topk"]} if "groups" in options else {}
    )
    return RouterConfig(
        score="sigmoid" if options["score"] == "sigmoid" else "softmax",
        normalize=options.get("norm", options["score"] == "topk_softmax"),
        scale=options.get("scale", 1.0),
        bias=options.get("bias", False),
        group_score="max" if options.get("best") == 1 else "top2",
        **groups,
    )


def check_gradients(name, x, w):
    for tensor, gradient in ((x, "gx"), (w, "gw")):
        np.testing.assert_allclose(tensor.grad.numpy(), GOLDENS[f"{name}/{gradient}"], **EQUAL)


@pytest.mark.parametrize("name", ROUTERS)
def test_choices_weights_and_their_gradients(name, logits):
    options, (x, w, of) = json.loads(str(GOLDENS[f"{name}/options"])), logits
    cfg, z = section(options), of()
    if options.get("linear_bias"):
        z = z + paddle.to_tensor(GOLDENS["linear_bias"].astype("float32"))
    bias = paddle.to_tensor(GOLDENS["bias"].astype("float32")) if cfg.bias else None
    choice, weights, _ = routing.route(z.unsqueeze(1), options["k"], cfg, bias)  # the tokens are one sequence
    kept = paddle.ones_like(weights)
    if "capacity" in options:
        limits = {"num_experts": EXPERTS, "factor": options["capacity"], "policy": options["policy"]}
        kept = routing.within_capacity(choice, weights, paddle.ones([z.shape[0], 1]), **limits)
    assert (np.sort(choice.numpy()[:, 0]) == np.sort(GOLDENS[f"{name}/choice"])).all()
    dense = paddle.zeros_like(z).put_along_axis(choice.squeeze(1), (weights * kept).squeeze(1), 1)
    np.testing.assert_allclose(dense.numpy(), GOLDENS[f"{name}/weights"], **EQUAL)
    (dense * paddle.to_tensor(GOLDENS["r"].astype("float32"))).sum().backward()
    check_gradients(name, x, w)


def balance(kind, logits, masked):
    """The balancing loss of the golden's tokens, with expert shares of the same tokens."""
    score = "sigmoid" if kind in ("megatron_sigmoid", "deepseek_v3_sequence") else "softmax"
    scores = logits.reshape([LENGTH, BATCH, EXPERTS])
    choice, _, scores = routing.route(scores, 1 if "gshard" in kind else TOP_K, RouterConfig(score=score))
    chosen = routing.chosen_mask(choice, EXPERTS)
    counts = paddle.ones([LENGTH, BATCH])
    if masked:
        counts = paddle.to_tensor(~GOLDENS["pad"]).astype("float32").reshape([LENGTH, BATCH])
    if kind.endswith("sequence"):
        return routing.sequence_balance(routing.sequence_sums(scores, chosen, counts), TOP_K).mean()
    if kind == "z":
        values = routing.z_loss(logits.reshape([LENGTH, BATCH, EXPERTS]))
    else:
        taken = chosen * counts.unsqueeze(-1)
        values = routing.balance_of_shares(scores, taken.sum([0, 1]) / taken.sum())
    return (values * counts).sum() / counts.sum() * (TOP_K if kind == "hf" else 1)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("megatron", "switch"),
        ("megatron_masked", "switch"),
        ("megatron_sigmoid", "megatron_sigmoid"),
        ("hf", "hf"),
        ("hf_masked", "hf"),
        ("gshard_top1_counts", "gshard"),
        ("megatron_sequence", "sequence"),
        ("deepseek_v3_sequence", "deepseek_v3_sequence"),
        ("z", "z"),
        ("z_masked", "z"),
    ],
)
def test_losses_and_their_gradients(name, kind, logits):
    x, w, of = logits
    loss = balance(kind, of(), name.endswith("masked"))
    loss.backward()
    np.testing.assert_allclose(loss.numpy(), GOLDENS[f"loss/{name}"], rtol=1e-5)
    check_gradients(f"loss/{name}", x, w)


def test_the_bias_moves_towards_equal_loads():
    bias, counts = (paddle.to_tensor(GOLDENS[name].astype("float32")) for name in ("bias", "bias/counts"))
    moved = routing.moved_bias(bias, counts, float(GOLDENS["bias/rate"]))
    np.testing.assert_allclose(moved.numpy(), GOLDENS["bias/sign"], **EQUAL)


def test_positions_that_do_not_count_are_neither_limited_nor_in_the_limit():
    choice = paddle.zeros([6, 1, 1], "int64")  # all choose the first of two experts
    counts = paddle.to_tensor([[1.0], [1.0], [0.0], [1.0], [1.0], [0.0]])
    weights = paddle.to_tensor([0.1, 0.4, 0.9, 0.3, 0.2, 0.9]).reshape([6, 1, 1])
    for policy, kept in (("position", [1, 1, 1, 0, 0, 1]), ("probs", [0, 1, 1, 1, 0, 1])):
        found = routing.within_capacity(choice, weights, counts, num_experts=2, factor=1.0, policy=policy)
        assert found.reshape([-1]).tolist() == kept
