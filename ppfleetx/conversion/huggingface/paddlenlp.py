"""Read Llama models that PaddleNLP or PaddleFormers wrote. Unlike Hugging Face's, their linear weights are
usually ``[in, out]``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ppfleetx.checkpoint.lazy_tensors import LazyTensor
from ppfleetx.checkpoint.slices import Index
from ppfleetx.config.errors import CheckpointError
from ppfleetx.conversion.huggingface.config_import import of_paddle
from ppfleetx.conversion.huggingface.read_files import Stored
from ppfleetx.conversion.huggingface.tensor_mapping import rules
from ppfleetx.utils.log import get_logger

_PREFIX = "llama."  # of PaddleNLP's tensor names, in place of "model."
_FUSED = (".qkv_proj.weight", ".gate_up_fused_proj.weight", ".up_gate_proj.weight")
_HEAD = "lm_head.weight"


def to_hf_layout(
    stored: Stored, config: Mapping[str, Any], keys: Mapping[str, Any], directory: Path
) -> dict[str, LazyTensor]:
    """Return the tensors of a model directory with Hugging Face's names and layout. This changes only Llama
    models that PaddleNLP or PaddleFormers wrote.

    Args:
        stored: the tensors as they are in the files.
        config: the ``config.json``.
        keys: ``config`` converted to our `Model` section.

    Raises CheckpointError if Paddle's libraries wrote a model that is neither a Llama nor a GPT-2, or if
    the layout is ambiguous or not supported.
    """
    is_paddle = stored.is_paddle or (stored.formats == {None} and of_paddle(config))
    kind = config["model_type"]
    if kind == "gpt2" or not is_paddle:
        return stored.tensors
    if kind != "llama":
        raise CheckpointError(
            f"{directory} is a {kind} that PaddleNLP or PaddleFormers wrote. Of theirs only a llama is read; "
            f"a {kind} can be converted from Hugging Face's own files"
        )
    if "pt" in stored.formats:
        raise CheckpointError(f"{directory}: some of its files are PyTorch's and some Paddle's")
    if fused := [name for name in stored.tensors if name.endswith(_FUSED)]:
        raise CheckpointError(
            f"{directory} holds {fused[0]}, projections that PaddleNLP has fused. Load and save the model "
            "there with fuse_attention_qkv=False and fuse_attention_ffn=False, and convert that"
        )
    is_of_nlp = any(name.startswith(_PREFIX) for name in stored.tensors)
    tensors = {
        f"model.{name.removeprefix(_PREFIX)}" if name.startswith(_PREFIX) else name: tensor
        for name, tensor in stored.tensors.items()
    }
    linears = _linears(config)
    if _are_in_out(tensors, linears, directory):
        get_logger().info(
            f"{directory}: linears are read as [in, out], as PaddleNLP and PaddleFormers store them"
        )
        tensors = {
            name: _transposed(tensor) if name in linears else tensor for name, tensor in tensors.items()
        }
    if _HEAD in tensors and _is_head_in_out(tensors[_HEAD].shape, keys, is_of_nlp, directory):
        tensors[_HEAD] = _transposed(tensors[_HEAD])
    return tensors


def _linears(config: Mapping[str, Any]) -> dict[str, Index]:
    """Return {name: shape in Hugging Face's layout ``[out, in]``} for the linear weights in the layers."""
    return {
        name: shape
        for rule in rules(config)
        if rule.is_transposed and len(rule.shape) == 2
        for name, shape in zip(rule.theirs, rule.shapes, strict=True)
        if name != _HEAD
    }


def _are_in_out(tensors: Mapping[str, LazyTensor], linears: Mapping[str, Index], directory: Path) -> bool:
    """Return whether linear weights are stored as ``[in, out]``. Returns True if all are square. Raises
    CheckpointError if some are stored as ``[in, out]`` and some as ``[out, in]``."""
    found: dict[bool, str] = {}
    for name, (rows, columns) in linears.items():
        if rows != columns and name in tensors and sorted(tensors[name].shape) == sorted((rows, columns)):
            found.setdefault(tensors[name].shape != (rows, columns), name)
    if len(found) == 2:
        raise CheckpointError(
            f"{directory}: {found[True]} is stored as [in, out] and {found[False]} as [out, in]; nothing "
            "says how its square matrices are stored"
        )
    return False not in found


def _is_head_in_out(shape: Index, keys: Mapping[str, Any], is_of_nlp: bool, directory: Path) -> bool:
    """Return whether the head is stored as ``[hidden, vocabulary]``, as in PaddleNLP and older PaddleFormers.

    Args:
        is_of_nlp: whether PaddleNLP wrote the model. This decides the layout of a square head.

    Raises CheckpointError if PaddleFormers wrote a square head that is not tied. Its layout is unknown.
    """
    vocab, hidden = keys["vocab_size"], keys["hidden_size"]
    if vocab == hidden and not keys["tie_word_embeddings"]:
        if is_of_nlp:
            return True
        raise CheckpointError(
            f"{directory}: {_HEAD} is square, and PaddleFormers has stored it both ways; nothing says which"
        )
    return shape == (hidden, vocab) and vocab != hidden


def _transposed(tensor: LazyTensor) -> LazyTensor:
    if len(tensor.shape) != 2:
        return tensor
    return LazyTensor(tensor.dtype, tensor.shape[::-1], lambda: tensor.read().T)
