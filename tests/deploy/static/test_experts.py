"""Mixtures of experts in a program: the logits are the model's, for all routers and forms of experts."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import paddle
import pytest
from paddle import inference, nn
from paddle.static import InputSpec

from ppfleetx.config.sections.compress import WeightsConfig
from ppfleetx.config.sections.model import ModelConfig
from ppfleetx.deploy.static.experts import GroupedMatrix, grouped_matrices_of, grouped_product
from ppfleetx.deploy.static.linear import begin, matrices_of
from ppfleetx.models.gpt.stages import model_stages
from ppfleetx.models.staged_model import StagedModel
from ppfleetx.nn.cpu_ops import ops as cpu_ops
from ppfleetx.nn.layer_factory import LocalFactory
from ppfleetx.nn.quantized import with_quantized_weights
from tests.compress.runs import DEEPSEEK
from tests.deploy.exports import GPT2_STYLE, LLAMA_STYLE

SOFTMAX = {"num_experts": 5, "top_k": 3, "expert_ffn_size": 24}
MODELS = {
    "softmax": {**GPT2_STYLE, "moe": SOFTMAX},  # with biases
    "not_normalized": {
        **LLAMA_STYLE,
        "moe": {
            **SOFTMAX,
            "router": {"normalize": False, "scale": 2.0},
            "shared_experts": {"ffn_size": 16},
            "first_dense_layers": 1,
        },
    },
    "deepseek": DEEPSEEK,
    "adapters": {**DEEPSEEK, "lora": {"rank": 3}},
}
SMALL = {
    "int8": WeightsConfig(bits=8),
    "int4": WeightsConfig(bits=4, group_size=8),
    "w8a8": WeightsConfig(bits=8, activation_bits=8),
}
CASES = [
    *(("softmax", None), ("adapters", None)),
    *(("not_normalized", "int8"), ("deepseek", "int4"), ("deepseek", "w8a8")),
]


class Logits(nn.Layer):
    """The logits of ``tokens [b, s]`` as a program, with or without our own operators."""

    def __init__(self, model: StagedModel, by_cpu_ops: bool) -> None:
        super().__init__()
        self.model = model
        self.matrices = [*matrices_of(model), *grouped_matrices_of(model)]
        for matrix in self.matrices:
            matrix.by_cpu_ops = by_cpu_ops and isinstance(matrix, GroupedMatrix)

    def forward(self, tokens: paddle.Tensor, positions: paddle.Tensor) -> paddle.Tensor:
        begin(self.matrices)
        return self.model(tokens, positions)


def build(name: str, way: str | None) -> StagedModel:
    cfg, factory = ModelConfig(**MODELS[name], initializer_range=0.15), LocalFactory()
    small = None if way is None else SMALL[way]
    model = StagedModel(with_quantized_weights(model_stages(cfg, factory), small, factory), seed=5)
    rng = np.random.default_rng(1)
    for parameter in model.parameters():
        owned, shape = parameter.info.name, parameter.shape
        if parameter.dtype in (paddle.int8, paddle.uint8):
            low, high = (-127, 128) if parameter.dtype == paddle.int8 else (0, 256)
            parameter.set_value(rng.integers(low, high, shape).astype(str(parameter.dtype).split(".")[-1]))
        elif owned.endswith(".scale"):
            parameter.set_value(rng.uniform(1e-3, 2e-3, shape).astype("float32"))
        elif owned.endswith((".bias", ".lora.b")):
            parameter.set_value(rng.normal(0, 0.1, shape).astype("float32"))
    model.eval()
    return model


def save(layer: nn.Layer, path: Path, *inputs: InputSpec) -> None:
    with paddle.no_grad():
        paddle.jit.save(paddle.jit.to_static(layer, input_spec=[*inputs], full_graph=True), str(path))


def run(path: Path, **inputs: np.ndarray) -> np.ndarray:
    config = inference.Config(f"{path}.json", f"{path}.pdiparams")
    config.disable_gpu()
    config.disable_mkldnn()
    predictor = inference.create_predictor(config)
    for name, array in inputs.items():
        predictor.get_input_handle(name).copy_from_cpu(array)
    predictor.run()
    return predictor.get_output_handle(predictor.get_output_names()[0]).copy_to_cpu()


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(("name", "way"), CASES)
@pytest.mark.parametrize("by_cpu_ops", [False, True], ids=["paddle", "cpu_ops"])
def test_logits_are_those_of_the_model(name, way, by_cpu_ops, tmp_path) -> None:
    if by_cpu_ops and not cpu_ops.are_available():
        pytest.skip("the operators are not compiled")
    model = build(name, way)
    tokens = np.random.default_rng(2).integers(0, 300, (3, 11))
    positions = np.tile(np.arange(11), (3, 1))
    with paddle.no_grad():
        expected = model(paddle.to_tensor(tokens), paddle.to_tensor(positions)).numpy()
    ids = [InputSpec([None, None], "int64", name) for name in ("tokens", "positions")]
    save(Logits(model, by_cpu_ops), tmp_path / "model", *ids)
    for rows, columns in ((3, 11), (1, 1)):  # a single row leaves most experts without rows
        found = run(tmp_path / "model", tokens=tokens[:rows, :columns], positions=positions[:rows, :columns])
        apart = np.abs(found - expected[:columns, :rows]) / np.abs(expected).max()
        if way == "w8a8":  # a last bit may decide how an activation is rounded
            assert np.median(apart) < 1e-5 and apart.max() < 0.05
        else:
            assert apart.max() < 1e-5


@pytest.mark.parametrize("by_cpu_ops", [False, True], ids=["paddle", "cpu_ops"])
def test_each_row_is_multiplied_by_its_experts_matrix(by_cpu_ops, tmp_path) -> None:
    """Experts without rows, with one, with few and with many; columns that fill no panel."""
    if by_cpu_ops and not cpu_ops.are_available():
        pytest.skip("the operators are not compiled")
    multiply = cpu_ops.grouped_product if by_cpu_ops else grouped_product
    counts, rng = np.array([0, 1, 70, 0, 7, 8, 2, 0]), np.random.default_rng(0)
    weight = rng.normal(size=(len(counts), 137, 61)).astype("float32")
    x = rng.normal(size=(counts.sum(), 137)).astype("float32")

    class Product(nn.Layer):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("weight", paddle.to_tensor(weight))

        def forward(self, x: paddle.Tensor, counts: paddle.Tensor) -> paddle.Tensor:
            return multiply(x, self.weight, counts)

    specs = InputSpec([None, 137], "float32", "x"), InputSpec([len(counts)], "int64", "counts")
    save(Product(), tmp_path / "product", *specs)
    expected = np.concatenate(
        [rows @ one for rows, one in zip(np.split(x, counts.cumsum()[:-1]), weight, strict=True)]
    )
    np.testing.assert_allclose(run(tmp_path / "product", x=x, counts=counts), expected, rtol=0, atol=1e-4)
