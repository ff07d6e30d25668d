"""Read GPTQ and AWQ checkpoints. Linear layers are dequantized to floating-point weights.

In place of ``X.weight``, such a directory has 4- or 8-bit integers, packed into 32-bit words. For each output
and each group of inputs, it has a scale and an integer zero point:

=========  =========================  =====================
tensor     GPTQ                       AWQ (``gemm``)
=========  =========================  =====================
X.qweight  [in * bits / 32, out]      [in, out * bits / 32]
X.qzeros   [groups, out * bits / 32]  the same
X.scales   [groups, out]              the same
X.g_idx    [in], group of each input  none
=========  =========================  =====================

``weight[i, o] = scales[g, o] * (qweight[i, o] - qzeros[g, o])``, where ``g`` is the group of input ``i``.
Without ``g_idx``, each group is ``group_size`` consecutive inputs; a ``group_size`` of -1 means one group.

Sources: AutoGPTQ's ``nn_modules/qlinear/qlinear_cuda.py`` and ``quantization/config.py``, GPTQModel's
``utils/model.py`` and ``quantization/config.py``, AutoAWQ's ``modules/linear/gemm.py`` and
``utils/packing_utils.py``, transformers' ``utils/quantization_config.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ppfleetx.checkpoint.lazy_tensors import LazyTensor, cast
from ppfleetx.config.errors import CheckpointError, shown

QUANTIZATION = "quantization_config"
_PARTS = {"qweight": ("I32",), "qzeros": ("I32",), "scales": ("F16", "BF16", "F32"), "g_idx": ("I32",)}
_READ: dict[str, dict[str, tuple[Any, ...]]] = {
    "gptq": {
        "bits": (4, 8),
        "checkpoint_format": (None, "gptq", "gptq_v2"),
        "format": (None, "gptq", "gptq_v2"),
        "is_marlin_format": (None, False),
    },
    "awq": {
        "bits": (4,),
        **dict.fromkeys(("version", "checkpoint_format", "format"), (None, "gemm")),
        "zero_point": (None, True),
        "backend": (None, "autoawq", "auto"),
    },
}
"""quant_method -> key -> supported values. None among the values: the key can be missing."""
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # order of eight consecutive outputs in a word, from the lowest bits


def quantization(hf_config: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the ``quantization_config`` of a ``config.json``; None if there is none. String values are
    converted to lower case, and ``group_size`` is 128 if it is missing. Raises CheckpointError if the
    quantization is not supported."""
    given = hf_config.get(QUANTIZATION)
    if given is None or given == {}:
        return None
    if not isinstance(given, dict):
        raise CheckpointError(f"{QUANTIZATION}: {shown(given)} is not an object")
    scheme = {key: value.lower() if isinstance(value, str) else value for key, value in given.items()}
    scheme.setdefault("group_size", 128)
    method = scheme.get("quant_method")
    _check("quant_method", method, tuple(_READ))
    for key, values in _READ[method].items():
        _check(key, scheme.get(key), values)
    formats = {scheme.get("format"), scheme.get("checkpoint_format")} - {None}
    if len(formats) > 1:  # the zero points of the two formats differ by 1
        raise CheckpointError(
            f"{QUANTIZATION}: format and checkpoint_format differ: {' and '.join(sorted(formats))}"
        )
    size = scheme["group_size"]
    if type(size) is not int or (size < 1 and size != -1):
        raise CheckpointError(
            f"{QUANTIZATION}.group_size: {shown(size)} is neither -1 nor a positive integer"
        )
    if any(not rule.startswith("-:") for rule in scheme.get("dynamic") or ()):
        raise CheckpointError(
            f"{QUANTIZATION}.dynamic gives some linears settings of their own, which is not supported"
        )
    return scheme


def dequantized(
    tensors: Mapping[str, LazyTensor], hf_config: Mapping[str, Any], directory: Path, *, in_out: bool
) -> dict[str, LazyTensor]:
    """Return ``tensors`` with the quantized tensors of each linear layer replaced by one lazy tensor, the
    dequantized weight. It has the element type of the scales.

    Args:
        in_out: whether the dequantized weights are ``[in, out]``. If not, they are ``[out, in]``.

    Raises CheckpointError if a tensor is missing or invalid.
    """
    scheme = quantization(hf_config)
    found = dict(tensors)
    if scheme is None and any(name.endswith(".qweight") for name in tensors):
        raise CheckpointError(
            f"{directory} holds quantized weights, and its config.json does not say how; the object of "
            f"quantize_config.json belongs there as {QUANTIZATION}, with its quant_method"
        )
    for name in tensors if scheme else ():
        linear, _, part = name.rpartition(".")
        if part == "qweight":
            parts = {part: found.pop(f"{linear}.{part}", None) for part in _PARTS}
            found[f"{linear}.weight"] = _weight(f"{directory}: {linear}", parts, scheme, in_out)
    return found


def _check(key: str, value: Any, values: tuple[Any, ...]) -> None:
    if not any(type(value) is type(one) and value == one for one in values):
        read = " or ".join(shown(one) for one in values if one is not None)
        raise CheckpointError(
            f"{QUANTIZATION}.{key}: {shown(value)} is not supported; quantized weights are read with {read}"
        )


def _weight(
    linear: str, given: Mapping[str, LazyTensor | None], scheme: Mapping[str, Any], in_out: bool
) -> LazyTensor:
    parts = {name: part for name, part in given.items() if part is not None}
    is_awq, bits = scheme["quant_method"] == "awq", scheme["bits"]
    needs_order = bool(scheme.get("desc_act")) and not is_awq
    if absent := [name for name in _PARTS if name not in parts and (name != "g_idx" or needs_order)]:
        raise CheckpointError(f"{linear} has a qweight, and no {' and no '.join(absent)}")
    qweight, qzeros, scales = (parts[name] for name in ("qweight", "qzeros", "scales"))
    order, in_word = parts.get("g_idx"), 32 // bits
    rows, columns = qweight.shape
    inputs, outputs = (rows, columns * in_word) if is_awq else (rows * in_word, columns)
    size = max(inputs, 1) if scheme["group_size"] == -1 else scheme["group_size"]
    groups = -(-inputs // size)
    wanted = {
        "qweight": qweight.shape,
        "qzeros": (groups, -(-outputs // in_word)),
        "scales": (groups, outputs),
        "g_idx": (inputs,),
    }
    for name, part in parts.items():
        if part.shape != wanted[name] or part.dtype not in _PARTS[name]:
            raise CheckpointError(
                f"{linear}.{name} is {part.dtype} {list(part.shape)}; its qweight {list(qweight.shape)} with "
                f"bits = {bits} and group_size = {scheme['group_size']} in {QUANTIZATION} asks for "
                f"{' or '.join(_PARTS[name])} {list(wanted[name])}"
            )

    def load() -> np.ndarray:
        group = np.arange(inputs) // size if order is None else order.read()
        words = qzeros.read().view(np.uint32)
        if not is_awq and (scheme.get("format") or scheme.get("checkpoint_format")) != "gptq_v2":
            # The first format stores z - 1, subtracted from all zero points of a word at once, so that a
            # zero point of 0 borrows from its neighbor. Adding 1 in the same way undoes the borrow.
            words = words + np.uint32(sum(1 << low for low in range(0, 32, bits)))
        zeros = _integers(words, bits, 1, is_awq)[:, :outputs]
        middle = 2 ** (bits - 1)
        if scheme.get("sym") is True and not is_awq and (zeros != middle).any():
            raise CheckpointError(
                f"{linear}.qzeros holds other zero points than {middle}, the only one with sym = True in "
                f"{QUANTIZATION}; checkpoint_format there may be the wrong one of gptq and gptq_v2"
            )
        weight = _integers(qweight.read().view(np.uint32), bits, int(is_awq), is_awq).astype(np.float32)
        weight -= zeros[group]
        weight *= cast(scales.read(), scales.dtype, "F32")[group]
        weight = cast(weight, "F32", scales.dtype)
        return weight if in_out else weight.T

    return LazyTensor(scales.dtype, (inputs, outputs) if in_out else (outputs, inputs), load)


def _integers(words: np.ndarray, bits: int, axis: int, is_awq: bool) -> np.ndarray:
    """Unpack a matrix of 32-bit words to 4- or 8-bit integers. Each word becomes consecutive elements along
    ``axis``. AWQ permutes the integers in each word; if ``is_awq``, this is undone."""
    fields = [
        (words >> np.uint32(low) & np.uint32(2**bits - 1)).astype(np.uint8) for low in range(0, 32, bits)
    ]
    if is_awq:
        fields = [fields[_AWQ_ORDER.index(place)] for place in range(len(fields))]
    shape = [size * (len(fields) if place == axis else 1) for place, size in enumerate(words.shape)]
    return np.stack(fields, axis=axis + 1).reshape(shape)
