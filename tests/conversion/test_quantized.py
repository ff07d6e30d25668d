"""Directories whose linears GPTQ or AWQ has quantized, against loops that follow the formats' definitions."""

import json
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from ppfleetx.checkpoint.lazy_tensors import LazyTensor
from ppfleetx.config.errors import CheckpointError
from ppfleetx.config.sections.model import ModelConfig
from ppfleetx.conversion.convert import Conversion, convert, our_logits
from ppfleetx.conversion.huggingface.directory import read_hf
from ppfleetx.conversion.huggingface.gptq_awq import dequantized
from tests.conversion import hf_dirs
from tests.models.gpt_builders import load_golden

GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 16, "desc_act": False, "sym": False}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 16, "version": "GEMM", "zero_point": True}


def packed(words):
    """Words as lists of their integers, the first in the lowest bits: a matrix of int32."""
    bits = 32 // len(words[0][0])
    values = [[sum(one << bits * at for at, one in enumerate(word)) for word in row] for row in words]
    return np.array(values, np.uint64).astype(np.uint32).view(np.int32)


def quantized(q, zeros, scales, group, scheme):
    """The tensors of one linear, from integers [in, out], and zero points and scales [groups, out]."""
    (inputs, outputs), count = q.shape, 32 // scheme["bits"]
    if scheme["quant_method"] == "awq":
        order = (0, 2, 4, 6, 1, 3, 5, 7)

        def rows(matrix):
            return [[[int(row[o + at]) for at in order] for o in range(0, outputs, 8)] for row in matrix]

        return {"qweight": packed(rows(q)), "qzeros": packed(rows(zeros)), "scales": scales}

    def along_rows(matrix):
        return [
            [[int(one) for one in row[o : o + count]] for o in range(0, outputs, count)] for row in matrix
        ]

    qweight = packed(
        [[[int(one) for one in column] for column in q[i : i + count].T] for i in range(0, inputs, count)]
    )
    qzeros = packed(along_rows(zeros))
    if scheme.get("checkpoint_format") != "gptq_v2":
        ones = packed([[[1] * count]]).item()
        words = [[(int(word) - ones) % 2**32 for word in row] for row in qzeros]
        qzeros = np.array(words, np.uint32).view(np.int32)
    return {"qweight": qweight, "qzeros": qzeros, "scales": scales, "g_idx": np.array(group, np.int32)}


def weight_of(q, zeros, scales, group):
    """[out, in]."""
    weight = np.empty(q.shape[::-1], np.float32)
    for i, g in enumerate(group):
        for o in range(q.shape[1]):
            weight[o, i] = np.float32(scales[g, o]) * (int(q[i, o]) - int(zeros[g, o]))
    return weight.astype(scales.dtype)


def random_linear(scheme, inputs, outputs, seed=0):
    """Integers, zero points, scales and the group of each input."""
    rng = np.random.default_rng(seed)
    size = inputs if scheme["group_size"] == -1 else scheme["group_size"]
    group = [i // size for i in range(inputs)]
    if scheme.get("desc_act"):
        rng.shuffle(group)
    top = 2 ** scheme["bits"]
    shape = (-(-inputs // size), outputs)
    zeros = np.full(shape, top // 2) if scheme.get("sym") else rng.integers(0, top, shape)
    scales = rng.uniform(0.001, 0.02, shape).astype(np.float16)
    return rng.integers(0, top, (inputs, outputs)), zeros, scales, group


def lazy(arrays, prefix="a."):
    kinds = {"int32": "I32", "int64": "I64", "float16": "F16", "float32": "F32"}
    return {
        f"{prefix}{name}": LazyTensor(kinds[value.dtype.name], value.shape, partial(np.asarray, value))
        for name, value in arrays.items()
    }


@pytest.mark.parametrize(
    "scheme",
    [
        GPTQ,
        GPTQ | {"sym": True},
        GPTQ | {"bits": 8, "group_size": 24},
        GPTQ | {"desc_act": True, "sym": True, "checkpoint_format": "gptq"},
        GPTQ | {"desc_act": True, "checkpoint_format": "gptq_v2"},
        GPTQ | {"bits": 8, "group_size": -1, "checkpoint_format": "gptq_v2"},
        GPTQ | {"group_size": -1},
        AWQ,
        AWQ | {"group_size": -1},
    ],
    ids=lambda scheme: "-".join(str(value) for value in scheme.values()),
)
def test_one_linear(scheme):
    numbers = random_linear(scheme, 64, 40)
    parts = quantized(*numbers, scheme)
    config = {"quantization_config": scheme}
    other = {"b.weight": np.ones((3, 5), np.float32), "a.bias": np.ones(40, np.float16)}
    found = dequantized(lazy(parts) | lazy(other, ""), config, Path("x"), in_out=False)
    assert found.keys() == {"a.weight", *other}
    assert found["a.weight"].dtype == "F16"
    np.testing.assert_array_equal(found["a.weight"].read(), weight_of(*numbers))
    np.testing.assert_array_equal(found["b.weight"].read(), other["b.weight"])
    if not scheme.get("desc_act"):  # groups in a row need no g_idx
        parts.pop("g_idx", None)
        again = dequantized(lazy(parts), config, Path("x"), in_out=True)
        np.testing.assert_array_equal(again["a.weight"].read(), weight_of(*numbers).T)


@pytest.mark.parametrize(
    "scheme, change, words",
    [
        (GPTQ, {"scales": None}, "x: a has a qweight, and no scales"),
        (GPTQ | {"desc_act": True}, {"g_idx": None}, "no g_idx"),
        (GPTQ, {"scales": np.ones((3, 40), np.float16)}, r"a.scales is F16 \[3, 40\].* F32 \[4, 40\]"),
        (GPTQ, {"scales": np.ones((4, 40), np.int32)}, "a.scales is I32"),
        (GPTQ, {"qzeros": np.ones((4, 4), np.int32)}, r"a.qzeros is I32 \[4, 4\].*\[4, 5\]"),
        (GPTQ, {"qweight": np.ones((9, 40), np.int32)}, r"its qweight \[9, 40\] with bits = 4"),
        (GPTQ, {"g_idx": np.zeros(56, np.int32)}, r"a.g_idx is I32 \[56\].*\[64\]"),
        (GPTQ, {"qweight": np.ones((8, 40), np.int64)}, "a.qweight is I64"),
        (GPTQ | {"format": "gptq", "checkpoint_format": "gptq_v2"}, {}, "differ: gptq and gptq_v2"),
        (GPTQ | {"sym": True}, {"qzeros": np.full((4, 5), -0x77777778, np.int32)}, "than 8.*gptq_v2"),
        (AWQ, {"qzeros": np.ones((4, 40), np.int32)}, r"a.qzeros is I32 \[4, 40\]"),
        (AWQ, {"qweight": np.ones((8, 40), np.int32)}, r"\[8, 40\] with bits = 4 and group_size = 16"),
    ],
)
def test_damaged_linears_are_refused(scheme, change, words):
    parts = quantized(*random_linear(scheme, 64, 40), scheme) | change
    tensors = lazy({name: value for name, value in parts.items() if value is not None})
    with pytest.raises(CheckpointError, match=words):
        dequantized(tensors, {"quantization_config": scheme}, Path("x"), in_out=False)["a.weight"].read()


@pytest.mark.parametrize(
    "name, scheme",
    [
        ("hf_llama", GPTQ | {"desc_act": True}),
        ("hf_llama", AWQ | {"modules_to_not_convert": ["lm_head"]}),
        ("hf_gpt2", GPTQ | {"bits": 8}),
    ],
)
def test_a_whole_model(tmp_path, name, scheme):
    source, plain = (hf_dirs.write(tmp_path / place, name, dtype=np.float16) for place in ("q", "plain"))
    tensors, weights = (load_file(place / "model.safetensors") for place in (source, plain))
    linears = [
        key for key, value in weights.items() if value.ndim == 2 and (".layers." in key or ".h." in key)
    ]
    for seed, key in enumerate(linears):
        in_out = name == "hf_gpt2"  # its linears are [in, out]
        inputs, outputs = weights[key].shape if in_out else weights[key].shape[::-1]
        numbers = random_linear(scheme, inputs, outputs, seed)
        del tensors[key]
        linear = key.removesuffix("weight")
        tensors |= {f"{linear}{part}": value for part, value in quantized(*numbers, scheme).items()}
        if name == "hf_llama":  # as older versions of AutoGPTQ
            tensors[f"{linear}bias"] = np.zeros(outputs, np.float16)
        weights[key] = weight_of(*numbers).T.copy() if in_out else weight_of(*numbers)
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    save_file(weights, plain / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"quantization_config": scheme}))

    tokens = load_golden(name)[1]["tokens"]
    theirs, ours = (
        our_logits(found, ModelConfig(**found.model), tokens) for found in map(read_hf, (plain, source))
    )
    np.testing.assert_array_equal(ours, theirs)

    convert(Conversion("hf", "hf", source, tmp_path / "back"))
    assert "quantization_config" not in json.loads((tmp_path / "back" / "config.json").read_text())
    found = load_file(tmp_path / "back" / "model.safetensors")
    for key in linears:
        np.testing.assert_array_equal(found[key], weights[key])

    if name == "hf_llama":
        tensors[f"{linear}bias"] += 1
        save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(CheckpointError, match=r"does not have: .*bias"):
            read_hf(source)


def test_weights_whose_form_nothing_tells_are_refused(tmp_path):
    with pytest.raises(CheckpointError, match=r"quantize_config\.json"):
        dequantized({"model.layers.0.mlp.down_proj.qweight": None}, {}, tmp_path, in_out=False)
