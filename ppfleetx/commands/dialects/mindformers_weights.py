"""What ``convert_weight.py`` of MindFormers does: one file of Hugging Face's GPT-2 becomes a checkpoint."""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ppfleetx.checkpoint.documents import tokenizer_files
from ppfleetx.checkpoint.lazy import LazyTensor
from ppfleetx.config.counts import counted
from ppfleetx.config.errors import CheckpointError, ConfigError, UserError
from ppfleetx.conversion.convert import Conversion, convert
from ppfleetx.conversion.huggingface.files import (
    CONFIG,
    GENERATION_CONFIG,
    PICKLE,
    read_hf_config,
    read_stored,
)
from ppfleetx.conversion.safetensors_file import SINGLE

_HEAD_WIDTH = 64  # of every published GPT-2
_LAYER = re.compile(r"(?:transformer\.)?h\.(\d{1,5})\.ln_1\.weight")


def convert_weight(torch_path: Path, output: Path, *, layers: int, num_heads: int | None = None) -> Path:
    """Convert ``torch_path``, with the config.json and the tokenizer beside it if they are there.

    Args:
        torch_path: ``pytorch_model.bin`` or ``model.safetensors``, under any name.
        output: a new or empty directory.
        layers: layers of the model; the file must have as many.
        num_heads: attention heads, where no config.json says it; None: heads of 64.

    Returns:
        The step directory that was written.

    Raises:
        UserError: a file that is missing, damaged or of another model, or an output in the way.
    """
    if not torch_path.is_file():
        raise ConfigError("there is no such file", key="--torch_path", value=str(torch_path))
    with tempfile.TemporaryDirectory(prefix="ppfleetx-") as directory:
        source = Path(directory)
        for name, path in _files(torch_path):
            (source / name).symlink_to(path.resolve())
        try:
            tensors = read_stored(source).tensors
            if not (source / CONFIG).exists():
                (source / CONFIG).write_text(json.dumps(_config(tensors, torch_path, num_heads)))
            _check_layers(tensors, read_hf_config(source), torch_path, layers)
            return convert(Conversion("hf", "ppfleetx", source, output))
        except UserError as error:  # of the user's files, not of their names in here
            text = str(error).replace(str(source / _weights_name(torch_path)), str(torch_path))
            raise type(error)(text.replace(str(source), str(torch_path.parent))) from None


def _files(torch_path: Path) -> Iterator[tuple[str, Path]]:
    yield _weights_name(torch_path), torch_path
    beside = [torch_path.parent / name for name in (CONFIG, GENERATION_CONFIG)]
    for path in (*filter(Path.is_file, beside), *tokenizer_files(torch_path.parent)):
        yield path.name, path


def _weights_name(torch_path: Path) -> str:
    return SINGLE if torch_path.suffix == ".safetensors" else PICKLE


def _config(tensors: dict[str, LazyTensor], path: Path, num_heads: int | None) -> dict[str, Any]:
    """What the shapes of the tensors say of the model, in Hugging Face's words."""
    words, positions = (_shape(tensors, name, path) for name in ("wte.weight", "wpe.weight"))
    width = words[1]
    if num_heads is None and width % _HEAD_WIDTH:
        raise ConfigError(
            f"{path.name} has a width of {width}, which is no multiple of {_HEAD_WIDTH}: give the "
            "number of attention heads, --num_heads"
        )
    heads = width // _HEAD_WIDTH if num_heads is None else num_heads
    if heads < 1 or width % heads:
        raise ConfigError(f"must divide the width {width}", key="--num_heads", value=heads)
    return {
        "model_type": "gpt2",
        "vocab_size": words[0],
        "n_embd": width,
        "n_positions": positions[0],
        "n_layer": _count_layers(tensors),
        "n_head": heads,
    }


def _shape(tensors: dict[str, LazyTensor], name: str, path: Path) -> tuple[int, ...]:
    tensor = tensors.get(name) or tensors.get(f"transformer.{name}")
    if tensor is None or len(tensor.shape) != 2:
        raise CheckpointError(f"{path} is no GPT-2: it has no {name}")
    return tensor.shape


def _count_layers(tensors: dict[str, LazyTensor]) -> int:
    return len({found[1] for name in tensors if (found := _LAYER.fullmatch(name))})


def _check_layers(tensors: dict[str, LazyTensor], config: dict[str, Any], path: Path, layers: int) -> None:
    if config.get("model_type") != "gpt2":
        raise CheckpointError(f"{path.parent / CONFIG}: is no GPT-2 but {config.get('model_type')}")
    count = _count_layers(tensors)
    if count != layers:
        raise ConfigError(f"{path.name} has {counted(count, 'layer')}", key="--layers", value=layers)
