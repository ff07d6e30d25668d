"""Read the configuration and the tensors of a model directory of Hugging Face, PaddleNLP or PaddleFormers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ppfleetx.checkpoint.lazy_tensors import LazyTensor
from ppfleetx.config.errors import CheckpointError, shown
from ppfleetx.conversion.paddle_file import read_paddle_file
from ppfleetx.conversion.safe_unpickler import flatten, reading
from ppfleetx.conversion.safetensors_file import (
    INDEX,
    PADDLE_FORMATS,
    SINGLE,
    read_safetensors,
    safetensors_format,
)
from ppfleetx.conversion.torch_file import read_torch_file
from ppfleetx.utils.input_files import read_json

CONFIG, PADDLE_CONFIG, GENERATION_CONFIG = "config.json", "model_config.json", "generation_config.json"
ADAPTER_CONFIG = "adapter_config.json"
PICKLE, PICKLE_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"
PADDLE_PICKLE, PADDLE_INDEX = "model_state.pdparams", "model_state.pdparams.index.json"
PADDLE_PICKLE_FORMAT = "pdparams"


@dataclass(frozen=True)
class Stored:
    """The tensors of a model directory, with the names and shapes that they have in the files.

    Attributes:
        formats: the formats of the files. A PyTorch pickle has the format `pt`, and a Paddle pickle
            `pdparams`. A safetensors file has the ``format`` in its metadata, such as `pt`, or None.
    """

    tensors: dict[str, LazyTensor]
    formats: frozenset[str | None]

    @property
    def is_paddle(self) -> bool:
        """Whether PaddleNLP or PaddleFormers wrote the files, according to ``formats``."""
        return not self.formats.isdisjoint(PADDLE_FORMATS | {PADDLE_PICKLE_FORMAT})


def read_hf_config(directory: Path) -> dict[str, Any]:
    """Read ``config.json``, or the ``model_config.json`` of older PaddleNLP versions. Raises
    CheckpointError if the file is missing or damaged."""
    if not (directory / CONFIG).exists() and (directory / PADDLE_CONFIG).is_file():
        return _flattened(read_json(directory / PADDLE_CONFIG))
    return read_json(directory / CONFIG)


def read_generation_config(directory: Path) -> dict[str, Any] | None:
    """Read ``generation_config.json``. Returns None if there is no such file. Raises CheckpointError if the
    file is damaged."""
    path = directory / GENERATION_CONFIG
    return read_json(path) if path.is_file() else None


def read_stored(directory: Path) -> Stored:
    """Read a model directory's tensors lazily. Raises CheckpointError if files are missing or damaged."""
    for index, single, read, format_of in (
        (INDEX, SINGLE, read_safetensors, safetensors_format),
        (PICKLE_INDEX, PICKLE, _read_pickle, lambda path: "pt"),
        (PADDLE_INDEX, PADDLE_PICKLE, read_paddle_file, lambda path: PADDLE_PICKLE_FORMAT),
    ):
        if (directory / index).is_file():
            return _indexed(directory, index, read, format_of)
        if (directory / single).is_file():
            return Stored(read(directory / single), frozenset({format_of(directory / single)}))
    raise CheckpointError(without_weights(directory))


def without_weights(directory: Path) -> str:
    """Return a message for the user about a model directory that has none of the files with weights that are
    read."""
    others = sorted(
        path.name
        for path in directory.glob("*")
        if path.suffix in (".safetensors", ".bin", ".pth", ".pt", ".pdparams", ".gguf", ".h5", ".msgpack")
    )
    here = f" (here: {', '.join(others[:3])}{', ...' if len(others) > 3 else ''})" if others else ""
    return (
        f"{directory} holds no weights that are read: neither {SINGLE}, {PICKLE} nor {PADDLE_PICKLE}, nor an "
        f"index of them{here}"
    )


def _read_pickle(path: Path) -> dict[str, LazyTensor]:
    tree = read_torch_file(path)
    if not isinstance(tree, dict):
        raise CheckpointError(f"{path} holds no state dict")
    with reading(path):
        return flatten(tree)


def _indexed(
    directory: Path,
    index: str,
    read: Callable[[Path], dict[str, LazyTensor]],
    format_of: Callable[[Path], str | None],
) -> Stored:
    where = read_json(directory / index).get("weight_map")
    if not isinstance(where, dict) or not all(isinstance(name, str) for name in where.values()):
        raise CheckpointError(f"{directory / index} has no weight_map from tensors to files")
    tensors: dict[str, LazyTensor] = {}
    formats = set()
    for name in dict.fromkeys(where.values()):
        if Path(name).name != name:  # the index may come from the hub
            raise CheckpointError(f"{directory / index} names {shown(name)}, which is not a file beside it")
        tensors |= read(directory / name)
        formats.add(format_of(directory / name))
    if absent := [name for name in where if name not in tensors]:
        raise CheckpointError(
            f"{directory / index} lists {shown(absent[0])}, which is not in {shown(where[absent[0]])}"
        )
    return Stored(tensors, frozenset(formats))


def _flattened(content: Mapping[str, Any]) -> dict[str, Any]:
    """Flatten the nested ``model_config.json`` of older PaddleNLP versions. Outer keys take precedence."""
    flat = {key: value for key, value in content.items() if key not in ("init_args", "init_class")}
    inner = content.get("init_args")
    for arguments in inner if isinstance(inner, list) else ():
        if isinstance(arguments, Mapping):
            flat = _flattened(arguments) | flat
    kind = content.get("init_class")
    if isinstance(kind, str) and kind.startswith("Llama"):
        flat.setdefault("model_type", "llama")
    return flat
