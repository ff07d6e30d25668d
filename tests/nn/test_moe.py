"""The mixture layer against a reference that computes every expert for every position; experts without
rows."""

import numpy as np
import paddle
import pytest
from paddle.static import InputSpec

from ppfleetx.compress.rounding import Stored, nearest
from ppfleetx.config.sections.compress import Form, QuantizationConfig
from ppfleetx.config.sections.lora import LoraConfig
from ppfleetx.config.sections.model import ModelConfig
from ppfleetx.models.gpt.spec import active_count, gpt_spec, model_spec, parameter_count, parameter_shapes
from ppfleetx.nn.fake_quant import quantize_linear
from ppfleetx.nn.init import Normal
from ppfleetx.nn.layer_factory import LocalFactory
from ppfleetx.nn.layer_spec import LinearSpec
from ppfleetx.nn.mlp_spec import GroupedLinearSpec
from ppfleetx.nn.moe import MoE, Order
from ppfleetx.nn.routing import chosen_mask
from ppfleetx.nn.stage import Stage, build_stage

SIZES = {
    "vocab_size": 128,
    "hidden_size": 8,
    "num_layers": 2,
    "num_attention_heads": 2,
    "ffn_hidden_size": 12,
}
PLAIN = {"num_experts": 4, "top_k": 2}
CASES = {
    "gated": ({**PLAIN, "expert_ffn_size": 6}, {"hidden_act": "swiglu", "add_bias_linear": False}),
    "biases": (PLAIN, {"hidden_act": "gelu"}),
    "shared": ({**PLAIN, "shared_experts": {"ffn_size": 10, "gate": True}}, {"hidden_act": "relu"}),
    "one": ({"num_experts": 4, "top_k": 1, "router": {"normalize": False}}, {}),
    "sigmoid": ({**PLAIN, "top_k": 3, "router": {"score": "sigmoid", "bias": True, "scale": 2.0}}, {}),
}


def config(moe, **more):
    return ModelConfig(**SIZES, moe=moe, **more)


def layer_of(cfg):
    """The last block's layer with initialized values."""
    kwargs = {"factory": LocalFactory(), "spec": gpt_spec(cfg).blocks[-1].mlp}
    stage = Stage("decoder.layers.1.mlp", MoE, kwargs)
    with paddle.utils.unique_name.guard():
        layer = build_stage(stage, 7)
    for parameter in layer.parameters():  # those that begin at zero would hide mistakes
        if not parameter.stop_gradient:
            parameter.set_value(0.5 * paddle.randn(parameter.shape))
    return layer


def every_expert(layer, hidden):
    """The layer's output, computed with all experts at all positions."""
    routing, _, _ = layer.router(hidden)
    dense = chosen_mask(routing.choice, layer.num_experts).put_along_axis(routing.choice, routing.weights, -1)
    fc1, fc2 = layer.experts.fc1, layer.experts.fc2
    total = 0
    for expert in range(layer.num_experts):
        inner = paddle.matmul(hidden, fc1.weight[expert])
        inner = layer.experts.activation(inner if fc1.bias is None else inner + fc1.bias[expert])
        out = paddle.matmul(inner, fc2.weight[expert])
        out = out if fc2.bias is None else out + fc2.bias[expert]
        total = total + out * dense[:, :, expert : expert + 1]
    if layer.shared is not None:
        total = total + layer.shared(hidden) * paddle.nn.functional.sigmoid(layer.shared_gate(hidden))
    return total


def gradients(layer, function, hidden):
    """Gradients of all trainable parameters and of the input."""
    hidden = hidden.detach()
    hidden.stop_gradient = False
    out = function(hidden)
    (out * out.detach().cos()).sum().backward()
    found = {name: p.grad.numpy() for name, p in layer.named_parameters() if not p.stop_gradient}
    found["hidden"] = hidden.grad.numpy()
    layer.clear_gradients()
    return out.numpy(), found


@pytest.mark.parametrize("case", CASES)
def test_output_and_gradients(case):
    moe, more = CASES[case]
    paddle.seed(3)
    layer, hidden = layer_of(config(moe, **more)), paddle.randn([5, 3, 8])
    out, found = gradients(layer, layer, hidden)
    wanted, of_all = gradients(layer, lambda x: every_expert(layer, x), hidden)
    np.testing.assert_allclose(out, wanted, rtol=1e-4, atol=1e-5)
    assert found.keys() == of_all.keys()
    for name, gradient in found.items():
        np.testing.assert_allclose(gradient, of_all[name], rtol=1e-4, atol=1e-5, err_msg=name)


def test_an_expert_without_positions_has_a_gradient_of_zeros():
    layer = layer_of(config({"num_experts": 4, "top_k": 1}))
    layer.router.weight.set_value(paddle.zeros_like(layer.router.weight))  # the first of equal ones is chosen
    (layer(paddle.randn([4, 2, 8])) ** 2).sum().backward()
    used = [bool(layer.experts.fc1.weight.grad[expert].abs().sum() > 0) for expert in range(4)]
    assert sum(used) == 1


def test_declared_parameters_are_those_of_the_layer():
    cfg = config({**PLAIN, "layers": [1], "shared_experts": {"ffn_size": 4}, "aux_loss": {"kind": "switch"}})
    shapes = {name: list(shape) for name, shape in parameter_shapes(cfg).items() if ".1.mlp." in name}
    made = {parameter.info.name: parameter.shape for parameter in layer_of(cfg).parameters()}
    assert made == shapes
    assert "decoder.layers.0.mlp.fc1.weight" in parameter_shapes(cfg)
    assert shapes["decoder.layers.1.mlp.experts.fc1.weight"] == [4, 8, 12]


def test_active_parameters():
    """Published for Mixtral 8x7B: 46.7 billion parameters, 12.9 billion active."""
    cfg = ModelConfig(
        vocab_size=32000,
        hidden_size=4096,
        num_layers=32,
        num_attention_heads=32,
        num_query_groups=8,
        ffn_hidden_size=14336,
        hidden_act="swiglu",
        normalization="RMSNorm",
        add_bias_linear=False,
        tie_word_embeddings=False,
        position_embedding_type="rope",
        moe={"num_experts": 8},
    )
    assert round(parameter_count(cfg) / 1e9, 1) == 46.7
    assert round(active_count(cfg) / 1e9, 1) == 12.9
    adapted = cfg.model_copy(update={"lora": LoraConfig(rank=8)})
    used, added = (count(adapted) - count(cfg) for count in (active_count, parameter_count))
    assert 0 < used < added  # those of idle experts are idle
    assert model_spec(cfg).metrics == ("balance_loss", "router_entropy")


def grouped(width_in, width_out):
    """The linears of three experts with initialized values."""
    factory = LocalFactory()
    layer = factory.grouped_linear(
        GroupedLinearSpec(3, LinearSpec(width_in, width_out, "columns", True, Normal(1.0)))
    )
    for parameter in layer.parameters():
        parameter.set_value(paddle.randn(parameter.shape))
    return factory, layer


@pytest.mark.parametrize(
    "form",
    [Form(8), Form(4, group_size=8), Form(8, activation_bits=8), Form(4, group_size=8, asymmetric=True)],
    ids=["int8", "int4", "int8 x int8", "int4 offsets"],
)
def test_experts_of_few_bits(form):
    factory, layer = grouped(16, 24)
    of_experts = [nearest(matrix, form) for matrix in layer.weight.numpy()]
    stored = Stored(*(np.stack([getattr(one, of) for one in of_experts]) for of in ("levels", "scale")), form)
    small = factory.quantized_linear(layer, form)
    small.weight.set_value(stored.packed())
    small.scale.set_value(stored.scale)
    layer.weight.set_value(stored.values())
    x, counts = paddle.randn([7, 16]), [3, 0, 4]
    x.stop_gradient = False
    tolerance = {"rtol": 1e-5, "atol": 1e-5} if form.activation_bits is None else {"atol": 0.2}
    for rows in (x, x.detach()):  # with and without a gradient of the input
        np.testing.assert_allclose(small(rows, counts).numpy(), layer(rows, counts).numpy(), **tolerance)
    small(x, counts).sum().backward()
    wanted, x.grad = x.grad.numpy(), None
    layer(x, counts).sum().backward()
    np.testing.assert_allclose(wanted, x.grad.numpy(), rtol=1e-4, atol=1e-4)
    assert small(x[:0], [0, 0, 0]).shape == [0, 24]


def test_adapters_of_experts_are_what_is_merged_into_their_matrices():
    factory, layer = grouped(6, 4)
    x, counts = paddle.randn([7, 6]), [3, 0, 4]
    branch = factory.lora(layer, LoraConfig(rank=2, alpha=6.0))
    branch.b.set_value(paddle.randn([3, 2, 4]))
    found = layer(x, counts) + branch(x, counts)
    layer.weight.set_value(layer.weight + 3.0 * paddle.matmul(branch.a, branch.b))
    np.testing.assert_allclose(found.numpy(), layer(x, counts).numpy(), rtol=1e-4, atol=1e-5)


def test_matrices_of_experts_are_rounded_each_by_itself():
    factory, layer = grouped(6, 4)
    layer.weight.set_value(layer.weight * paddle.to_tensor([1.0, 10.0, 100.0]).reshape([3, 1, 1]))
    cfg = QuantizationConfig(
        enable=True, weight_bits=4, activation_quantize_type="abs_max", activation_bits=16
    )
    quantize_linear(layer, factory.quantizer(layer, cfg, follows=True))
    rounded = layer.quant.weight(layer.weight).numpy()
    for matrix, on_grid in zip(layer.weight.numpy(), rounded, strict=True):
        step = np.abs(matrix).max() / 7
        np.testing.assert_allclose(on_grid, np.round(matrix / step) * step, rtol=1e-4, atol=1e-4 * step)
    layer(paddle.randn([7, 6]), [3, 0, 4]).sum().backward()
    assert layer.weight.grad.shape == [3, 6, 4] and not layer.weight.grad[1].any()
    assert layer(paddle.zeros([0, 6]), [0, 0, 0]).shape == [0, 4]


def test_a_rank_without_positions():
    """In decoding, ranks that share one position may have none to dispatch."""
    order = Order(paddle.zeros([0, 2], "int64"), 4, None)
    rows = order.dispatch(paddle.zeros([0, 8]))
    assert rows.shape == [0, 8] and order.counts.tolist() == [0, 0, 0, 0]
    assert order.combine(rows, paddle.zeros([0, 2])).shape == [0, 8]
    _, layer = grouped(8, 4)
    assert layer(rows, [0, 0, 0]).shape == [0, 4]


def test_a_rank_whose_choices_are_all_dropped():
    """With a capacity by position, a router that prefers one expert leaves nothing to the later ranks."""
    rows, weights = paddle.ones([3, 8]), paddle.ones([3, 2])
    rows.stop_gradient = weights.stop_gradient = False
    order = Order(paddle.to_tensor([[0, 1], [0, 2], [0, 1]]), 4, paddle.zeros([3, 2]))
    sent = order.dispatch(rows)
    assert sent.shape == [0, 8] and order.counts.tolist() == [0, 0, 0, 0]
    mixed = order.combine(sent, weights)
    assert mixed.shape == [3, 8] and not mixed.any()
    mixed.sum().backward()
    assert not rows.grad.any() and not weights.grad.any()


def test_an_export_has_no_branches():
    """A branch would cost time in every layer."""

    def mixed(rows, choice, weights):
        order = Order(choice, 4, None)
        return order.combine(order.dispatch(rows), weights)

    specs = [InputSpec([None, 8]), InputSpec([None, 2], "int64"), InputSpec([None, 2])]
    program = paddle.jit.to_static(mixed, specs, full_graph=True).concrete_program.main_program
    assert "pd_op.if" not in {operation.name() for operation in program.global_block().ops}
