"""A Llama as PaddleNLP and PaddleFormers store it, under Hugging Face's names and in its layout.

Paddle's linears are ``[in, out]``, Hugging Face's ``[out, in]``, and the names are the same (PaddleNLP says
``llama.`` for ``model.``). Which of both a file has is told by the shapes of its linears, where they are not
square, and otherwise by its metadata: ``format: np``, ``paddle`` or ``pd``, or a pickle of Paddle's. A file
without these is Hugging Face's.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ppfleetx.checkpoint.lazy import LazyTensor
from ppfleetx.checkpoint.slices import Index
from ppfleetx.config.errors import CheckpointError
from ppfleetx.conversion.huggingface.config_keys import of_paddle
from ppfleetx.conversion.huggingface.files import Stored
from ppfleetx.utils.log import get_logger

_PREFIX = "llama."
_FUSED = (".qkv_proj.weight", ".gate_up_fused_proj.weight", ".up_gate_proj.weight")
_HEAD = "lm_head.weight"


def in_hf_layout(
    stored: Stored, config: Mapping[str, Any], keys: Mapping[str, Any], directory: Path
) -> dict[str, LazyTensor]:
    """The tensors of a directory as Hugging Face would have stored them.

    Args:
        stored: the tensors as they lie in the files.
        config: its configuration.
        keys: the same as keys of our `Model` section.
        directory: where they are; used in messages.

    Raises:
        CheckpointError: projections are fused, it cannot be told how a matrix lies, or another network.
    """
    is_theirs = stored.is_paddle or (stored.formats == {None} and of_paddle(config))
    kind = config["model_type"]
    if kind == "gpt2" or not is_theirs:
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
    if _are_in_out(tensors, keys, directory):
        get_logger().info(
            f"{directory}: linears are read as [in, out], as PaddleNLP and PaddleFormers store them"
        )
        shapes = _hf_shapes(keys)
        tensors = {
            name: _turned(tensor) if _projection(name) in shapes else tensor
            for name, tensor in tensors.items()
        }
    if _HEAD in tensors and _is_head_turned(tensors[_HEAD].shape, keys, is_of_nlp, directory):
        tensors[_HEAD] = _turned(tensors[_HEAD])
    return tensors


def _hf_shapes(keys: Mapping[str, Any]) -> dict[str, Index]:
    """[out, in] of each linear of a layer."""
    hidden, inner, width = keys["hidden_size"], keys["ffn_hidden_size"], keys["head_dim"]
    queries, values = keys["num_attention_heads"] * width, keys["num_query_groups"] * width
    return {
        "q_proj": (queries, hidden),
        "k_proj": (values, hidden),
        "v_proj": (values, hidden),
        "o_proj": (hidden, queries),
        "gate_proj": (inner, hidden),
        "up_proj": (inner, hidden),
        "down_proj": (hidden, inner),
    }


def _projection(name: str) -> str | None:
    parts = name.split(".")
    return parts[-2] if len(parts) > 2 and parts[-1] == "weight" else None


def _are_in_out(tensors: Mapping[str, LazyTensor], keys: Mapping[str, Any], directory: Path) -> bool:
    """Whether the linears are [in, out]; true where all are square and none can tell."""
    shapes = _hf_shapes(keys)
    found: dict[bool, str] = {}
    for name, tensor in tensors.items():
        wanted = shapes.get(_projection(name) or "")
        if wanted is not None and wanted[0] != wanted[1] and tensor.shape in (wanted, wanted[::-1]):
            found.setdefault(tensor.shape != wanted, name)
    if len(found) == 2:
        raise CheckpointError(
            f"{directory}: {found[True]} is stored as [in, out] and {found[False]} as [out, in]; it cannot "
            "be told how square matrices lie"
        )
    return False not in found


def _is_head_turned(shape: Index, keys: Mapping[str, Any], is_of_nlp: bool, directory: Path) -> bool:
    """Whether the head is [hidden, vocabulary]. PaddleNLP's is, of PaddleFormers' only the older ones."""
    vocab, hidden = keys["vocab_size"], keys["hidden_size"]
    if vocab == hidden and not keys["tie_word_embeddings"]:
        if is_of_nlp:
            return True
        raise CheckpointError(
            f"{directory}: {_HEAD} is square, and PaddleFormers has stored it both ways; nothing says which"
        )
    return shape == (hidden, vocab) and vocab != hidden


def _turned(tensor: LazyTensor) -> LazyTensor:
    if len(tensor.shape) != 2:
        return tensor
    return LazyTensor(tensor.dtype, tensor.shape[::-1], lambda: tensor.read().T)
