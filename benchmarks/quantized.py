#!/usr/bin/env python3
"""Decoding speed of quantized models on a CPU, in pairs against our float32 and Hugging Face transformers.

    python benchmarks/quantized.py [--pairs 5] [--batches 1 8] [--modes float32 int8 ...] [--hf-python PYTHON]

The model, the prompts and the way of measuring are those of benchmarks/decode.py: 12 layers, hidden size 768,
64 greedy tokens after 64, no guesses, tokens per CPU second of a process, in rounds. Weights are random, and
rounded to the nearest.

float32, int8, int4, w8a8: this project; int8 and int4 have groups of 32 with offsets, and int4 has 8 bits in
the embedding and the head; w8a8 rounds activations too. pruned: float32 without a quarter of its heads and
feed-forward units.
exported_*: the same as a program that Paddle Inference runs.
hf: transformers in float32. hf_int8: the same with PyTorch's dynamic quantization of all linears (weights and
activations of 8 bits). hf_torchao, hf_torchao_weights: the same with torchao's 8 bits for weights and
activations, and for weights alone, not compiled. They run with the Python of --hf-python, which has torch,
transformers and torchao.

Before that the memory is measured: how fast one core reads a block of 1 GiB, which no cache holds. Bytes of
weights that a token reads over that speed is the time that no program can go below.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import decode
from harness import Worker, compile_operators, cpu_seconds, in_rounds, report, start_paddle

if TYPE_CHECKING:
    from ppfleetx.config.sections.compress import WeightsConfig
    from ppfleetx.generation.decoding_session import NextTokenModel

FORMS: dict[str, dict[str, int]] = {
    "int8": {"bits": 8, "group_size": 32, "asymmetric": True},
    "int4": {"bits": 4, "group_size": 32, "asymmetric": True},
    "w8a8": {"bits": 8, "activation_bits": 8},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--pairs", type=int, default=5, help="rounds in which every mode runs once")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--modes", nargs="+", default=list(MODES), choices=list(MODES))
    parser.add_argument("--hf-python", default=sys.executable)
    parser.add_argument("--worker", choices=list(MODES), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        decode.serve(MODES[args.worker]())
        return
    compile_operators()
    report_memory()
    pythons = {mode: args.hf_python if mode.startswith("hf") else sys.executable for mode in args.modes}
    workers = {mode: Worker(__file__, mode, 1, python=python) for mode, python in pythons.items()}
    try:
        for batch in args.batches:
            report(f"batch {batch}", in_rounds(workers, batch, args.pairs), COMPARED)
    finally:
        for worker in workers.values():
            worker.close()


def report_memory() -> None:
    """Print how fast one core reads, and the least time of a token that follows from it."""
    import numpy as np

    block = np.ones(1 << 27, np.float64)
    speeds = [block.nbytes / cpu_seconds(block.max) / 1e9 for _ in range(5)]
    print(f"memory: one core reads {max(speeds):.1f} GB/s")
    blocks = 12 * decode.HIDDEN**2 * decode.LAYERS
    head = decode.HIDDEN * decode.VOCAB
    for name, num_bytes in (
        ("float32", 4 * (blocks + head)),
        ("int8", (blocks + head) * 9 // 8),
        ("int4", blocks * 5 // 8 + head * 9 // 8),
    ):
        least = num_bytes / max(speeds) / 1e6
        print(f"memory: a token of {name} reads {num_bytes / 1e6:.0f} MB: {least:.1f} ms at least")
    sys.stdout.flush()


def small_model(weights: WeightsConfig) -> NextTokenModel:
    """The model of benchmarks/decode.py with its weights rounded to the nearest."""
    start_paddle()
    import numpy as np

    from ppfleetx.compress.rounding import nearest
    from ppfleetx.config.sections.root import ModelConfig
    from ppfleetx.generation.decoding_session import NextTokenModel
    from ppfleetx.models.gpt.stages import gpt_stages
    from ppfleetx.models.staged_model import StagedModel
    from ppfleetx.nn.layer_factory import InferenceFactory
    from ppfleetx.nn.quantized import with_quantized_weights
    from ppfleetx.nn.stage import canonical_parameters

    cfg = ModelConfig(**decode.SHAPE)
    factory = InferenceFactory()
    model = StagedModel(with_quantized_weights(gpt_stages(cfg, factory), weights, factory), None)
    rng = np.random.default_rng(0)
    parameters = canonical_parameters(model)
    for name, parameter in parameters.items():
        if "int8" not in str(parameter.dtype):
            if name.endswith("norm.weight"):
                parameter.set_value(np.ones(parameter.shape, np.float32))
            continue
        layer = name.removesuffix(".weight")
        form = weights.form_of(layer)
        rows, columns = parameter.shape
        values = rng.standard_normal((rows * 8 // form.bits, columns)).astype(np.float32) * 0.02
        is_table = layer.startswith("embedding")
        stored = nearest(values.T if is_table else values, form)
        parameter.set_value(stored.packed().T.copy() if is_table else stored.packed())
        parameters[f"{layer}.scale"].set_value(stored.scale.T.copy() if is_table else stored.scale)
    model.eval()
    return NextTokenModel(model, decode.VOCAB)


def small(form: str, run: Callable[..., decode.Generate]) -> decode.Generate:
    from ppfleetx.config.sections.compress import WeightsConfig

    return run(1, model=partial(small_model, WeightsConfig(**FORMS[form])))


def hugging_face_int8() -> decode.Generate:
    """transformers with PyTorch's dynamic quantization."""
    import torch

    def prepare(model: torch.nn.Module) -> torch.nn.Module:
        return torch.ao.quantization.quantize_dynamic(
            _with_linears(model), {torch.nn.Linear}, dtype=torch.qint8
        )

    return decode.hugging_face(1, prepare=prepare)


def hugging_face_torchao(config: str) -> decode.Generate:
    """transformers with torchao's quantization of all linears by this configuration, the head included."""
    from torchao import quantization

    def prepare(model: Any) -> Any:
        model = _with_linears(model)
        model.lm_head.weight = type(model.lm_head.weight)(model.lm_head.weight.detach().clone())  # untied
        quantization.quantize_(model, getattr(quantization, config)())
        return model

    return decode.hugging_face(1, prepare=prepare)


def _with_linears(model: Any) -> Any:
    """``model`` with linears in place of GPT-2's Conv1D layers."""
    import torch
    from transformers.pytorch_utils import Conv1D

    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, Conv1D):
                linear = torch.nn.Linear(*child.weight.shape)
                linear.weight.data, linear.bias.data = child.weight.data.t().contiguous(), child.bias.data
                setattr(module, name, linear)
    return model


PRUNED = {
    "num_attention_heads": decode.HEADS * 3 // 4,
    "head_dim": decode.HIDDEN // decode.HEADS,
    "ffn_hidden_size": 3 * decode.HIDDEN,
}
TORCHAO = {
    "hf_torchao": "Int8DynamicActivationInt8WeightConfig",
    "hf_torchao_weights": "Int8WeightOnlyConfig",
}
MODES: dict[str, Callable[[], decode.Generate]] = {
    "float32": lambda: decode.ours(1),
    "pruned": lambda: decode.ours(1, model=partial(decode.our_model, **PRUNED)),
    **{form: partial(small, form, decode.ours) for form in FORMS},
    "exported_float32": lambda: decode.exported(1),
    **{f"exported_{form}": partial(small, form, decode.exported) for form in FORMS},
    "hf": lambda: decode.hugging_face(1),
    "hf_int8": hugging_face_int8,
    **{mode: partial(hugging_face_torchao, config) for mode, config in TORCHAO.items()},
}
COMPARED = (
    *((form, "float32") for form in (*FORMS, "pruned")),
    *((f"exported_{form}", "exported_float32") for form in FORMS),
    *((form, other) for other in ("hf", "hf_int8", *TORCHAO) for form in FORMS),
)


if __name__ == "__main__":
    main()
