"""Read and write GGUF, llama.cpp's file format, which contains the network configuration, the weights and
the tokenizer. The conversion goes through Hugging Face's format."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from ppfleetx.checkpoint.lazy_tensors import LazyTensor, cast
from ppfleetx.checkpoint.weights import Weights, network_of, shown_reading
from ppfleetx.config.errors import CheckpointError, ConfigError
from ppfleetx.config.resume_policy import network
from ppfleetx.config.sections.model import ModelConfig
from ppfleetx.conversion.gguf_config import (
    BY_TYPE,
    ROPE_FACTORS,
    Metadata,
    config_of,
    generation_config_of,
    metadata_of,
    rope_factors,
)
from ppfleetx.conversion.gguf_tokenizer import tokenizer_metadata, tokenizer_texts
from ppfleetx.conversion.huggingface.config_export import differences, hf_config
from ppfleetx.conversion.huggingface.config_import import model_keys
from ppfleetx.conversion.huggingface.directory import as_weights
from ppfleetx.conversion.huggingface.families import FAMILIES
from ppfleetx.conversion.huggingface.tensor_mapping import rules
from ppfleetx.data.tokenizer.json_files import write_files
from ppfleetx.data.tokenizer.tokenizer import Tokenizer
from ppfleetx.utils.input_files import first_bytes, opened
from ppfleetx.utils.installed import NotInstalledError

SUFFIX = ".gguf"
QUANTIZED = ("q8_0", "q4_0", "q4_1")
"""The quantized element types that can be written. All types that the ``gguf`` library dequantizes can be
read."""
_MAGIC = b"GGUF"
_BLOCK = 32  # weights per quantization scale
_FLOATS = ("F32", "F16", "BF16")
_SUFFIXES = (".weight", ".bias")


# ---- in


def is_gguf(path: Path) -> bool:
    """Return whether ``path`` is a GGUF file. Its name must end in ``.gguf``, or its content must begin
    with the magic number of GGUF."""
    if not path.is_file():
        return False
    if path.suffix == SUFFIX:
        return True
    with opened(path) as file:
        return file.read(len(_MAGIC)) == _MAGIC


def read_gguf(path: str | Path) -> Weights:
    """Read the weights of a GGUF file lazily. If at least one tensor is quantized, all are read as float32.

    Raises CheckpointError if the file is damaged or not supported; NotInstalledError if the ``gguf``
    package is not installed.
    """
    path = Path(path)
    metadata, tensors = _opened(path)
    factors = {name: tensors.pop(name).read() for name in ROPE_FACTORS if name in tensors}
    try:
        config = config_of(metadata, {name: tensor.shape for name, tensor in tensors.items()}, factors)
        keys = model_keys(config)
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from error
    network_of(keys, str(path))
    names = _name_converter(config)
    ours = {}
    for rule in rules(config, BY_TYPE[config["model_type"]].names):
        if missing := [name for name in map(names, rule.theirs) if name not in tensors]:
            raise CheckpointError(f"{path} lacks the tensor {missing[0]}")
        parts = [_in_hf_layout(tensors.pop(names(theirs)), theirs, config) for theirs in rule.theirs]
        ours[rule.ours] = rule.joined(parts, path)
    if tensors:
        raise CheckpointError(
            f"{path} holds tensors that this network does not have: {', '.join(sorted(tensors)[:4])}"
        )
    return as_weights(path, ours, keys, config, generation_config_of(metadata, config))


def extract_tokenizer(path: str | Path, directory: Path) -> Path:
    """Write the tokenizer of a GGUF file to ``directory``, in transformers' format. Returns ``directory``.
    Raises CheckpointError if the file is damaged, or the tokenizer is not supported."""
    metadata, _ = _opened(Path(path))
    write_files(tokenizer_texts(metadata, str(path)), directory)
    return directory


def _library() -> Any:
    try:
        import gguf
    except ModuleNotFoundError:
        raise NotInstalledError(
            "gguf, which reads and writes GGUF files, is not installed in this Python: run "
            "`pip install 'ppfleetx[gguf]'`"
        ) from None
    return gguf


# Opening a file takes seconds if the vocabulary is large.
@lru_cache(maxsize=1)
def _reader(path: Path, version: tuple[int, ...]) -> Any:
    """Open a GGUF file. The result is cached until another file is opened.

    Args:
        version: part of the cache key: numbers that change when the file changes, such as its size.
    """
    return _library().GGUFReader(path)


def _opened(path: Path) -> tuple[dict[str, Any], dict[str, LazyTensor]]:
    if first_bytes(path)[:4] != _MAGIC:
        raise CheckpointError(f"{path} is not a GGUF file: it does not begin with {_MAGIC.decode()}")
    try:
        stat = path.stat()
        reader = _reader(path, (stat.st_dev, stat.st_ino, stat.st_mtime_ns, stat.st_size))
        metadata = {key: one.contents() for key, one in reader.fields.items()}
    except (ValueError, IndexError, KeyError, OverflowError) as error:  # the library does not handle these
        raise CheckpointError(f"{path} is damaged or cut off: {error}") from error
    count = metadata.get("split.count", 1)
    if count > 1:
        raise CheckpointError(
            f"{path} is one of {count} parts of a model; merge them with llama.cpp's llama-gguf-split --merge"
        )
    is_quantized = any(one.tensor_type.name not in _FLOATS for one in reader.tensors)
    return metadata, {one.name: _tensor(one, path, is_quantized) for one in reader.tensors}


def _tensor(stored: Any, path: Path, is_quantized: bool) -> LazyTensor:
    """Make a lazy tensor from ``stored``, a tensor entry of the ``gguf`` library's reader.

    Args:
        is_quantized: whether the file has quantized tensors. If so, this tensor is read as float32.
    """
    kind, shape = stored.tensor_type, tuple(int(size) for size in reversed(stored.shape))
    quants = _library().quants
    if kind.name not in _FLOATS:
        _, size = _library().GGML_QUANT_SIZES[kind]
        try:
            quants.dequantize(np.zeros((1, size), np.uint8), kind)
        except NotImplementedError:
            raise CheckpointError(
                f"{path}: {stored.name} has the element type {kind.name}, which is not read"
            ) from None
    if is_quantized or kind.name == "F32":
        return LazyTensor("F32", shape, lambda: quants.dequantize(stored.data, kind).reshape(shape))
    bits = np.uint16 if kind.name == "BF16" else np.float16
    return LazyTensor(kind.name, shape, lambda: stored.data.view(bits).reshape(shape))


def _name_converter(config: Mapping[str, Any]) -> Any:
    library, row = _library(), BY_TYPE[config["model_type"]]
    kind = next(one for one, name in library.MODEL_ARCH_NAMES.items() if name == row.name)
    table = library.get_tensor_name_map(kind, config.get("num_hidden_layers") or config["n_layer"])

    def name(theirs: str) -> str:
        found = table.get_name(theirs, try_suffixes=_SUFFIXES)
        if found is None:
            raise CheckpointError(f"GGUF files of {row.name} have no tensor for {theirs}")
        return found

    return name


def _is_transposed(name: str, config: Mapping[str, Any]) -> bool:
    """Return whether transformers and llama.cpp store a tensor differently: ``[in, out]`` in transformers,
    and ``[out, in]`` in llama.cpp."""
    return config["model_type"] == "gpt2" and ".h." in name


def _in_hf_layout(stored: LazyTensor, name: str, config: Mapping[str, Any]) -> LazyTensor:
    shape = stored.shape[::-1] if _is_transposed(name, config) else stored.shape
    if len(shape) == 1:
        stored = stored.cast("F32")  # _reshaped may subtract 1 from norm weights
    return LazyTensor(stored.dtype, shape, lambda: _reshaped(stored.read(), name, config, to_file=False))


def _reshaped(array: np.ndarray, name: str, config: Mapping[str, Any], *, to_file: bool) -> np.ndarray:
    """Convert a tensor's layout: from Hugging Face's to llama.cpp's if ``to_file``, else the other way.
    ``name`` is Hugging Face's name of the tensor."""
    kind, rest = config["model_type"], array.shape[1:]
    row = BY_TYPE[kind]
    if row.shifts_norms and name.endswith("norm.weight"):
        return array + 1 if to_file else array - 1
    if row.rotates_pairs and (found := re.search(r"self_attn\.([qk])_proj", name)):
        heads = config["num_attention_heads" if found[1] == "q" else "num_key_value_heads"]
        halves = (2, -1) if to_file else (-1, 2)
        return array.reshape(heads, *halves, *rest).swapaxes(1, 2).reshape(array.shape)
    if _is_transposed(name, config):
        return array.T
    if kind == "gpt_neox" and "query_key_value" in name:
        # llama.cpp stores all queries, then all keys, then all values; transformers groups them by head.
        groups = (config["num_attention_heads"], 3) if to_file else (3, config["num_attention_heads"])
        return array.reshape(*groups, -1, *rest).swapaxes(0, 1).reshape(array.shape)
    return array


# ---- out


def write_gguf(
    tensors: Mapping[str, LazyTensor],
    model: ModelConfig,
    path: str | Path,
    *,
    tokenizer: Tokenizer,
    dtype: str | None = None,
    source: Mapping[str, Any] | None = None,
) -> None:
    """Write a GGUF file that llama.cpp can run.

    Args:
        tensors: all parameters of ``model``, by ppfleetx's names. Vocabulary padding is included.
        tokenizer: the tokenizer to store in the file.
        dtype: the element type of most matrices, one of QUANTIZED; None keeps the types of ``tensors``.
            Vectors and position embeddings are always float32.
        source: ``Weights.source`` of the weights. If it contains a ``config.json`` that describes ``model``,
            this is used.

    Raises CheckpointError if llama.cpp does not support the network or the tokenizer.
    """
    library, path = _library(), Path(path)
    kinds = library.GGMLQuantizationType
    config = hf_config(model, "F32", original=(source or {}).get("config"))
    row = BY_TYPE.get(config["model_type"])
    if row is None:
        raise CheckpointError(
            f"this network is a {config['model_type']}, which cannot be written as GGUF; supported: "
            f"{', '.join(BY_TYPE)}"
        )
    # The original config.json may omit keys that have default values, or give null for them.
    given = {key: value for key, value in config.items() if value is not None}
    config = FAMILIES[config["model_type"]].config(config["model_type"], model, network(model)) | given
    names = _name_converter(config)
    theirs: dict[str, LazyTensor] = {}
    for rule in rules(config, row.names):
        for index, name in enumerate(rule.theirs):
            theirs[names(name)] = _part(rule, tensors[rule.ours], index, name, config)
    factors = rope_factors(model)
    theirs |= {name: LazyTensor("F32", one.shape, lambda one=one: one) for name, one in factors.items()}
    metadata = metadata_of(config, row, model)
    _check_same(model, metadata, theirs, factors)
    types = {name: kinds[_stored_type(name, tensor, dtype)] for name, tensor in theirs.items()}
    kind = (dtype or next(iter(theirs.values())).dtype).upper()
    metadata |= {
        "general.type": "model",
        "general.name": path.stem,
        "general.file_type": int(library.LlamaFileType["ALL_F32" if kind == "F32" else f"MOSTLY_{kind}"]),
        "general.quantization_version": library.GGML_QUANT_VERSION,
        **tokenizer_metadata(tokenizer, model.vocab_size),
    }
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}.") as scratch:
        writer = library.GGUFWriter(Path(scratch) / path.name, row.name)
        add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32}
        add |= {str: writer.add_string, list: writer.add_array}
        for key, value in metadata.items():
            if key != "general.architecture":  # the writer adds this key
                add[type(value)](key, value)
        for name, tensor in theirs.items():
            block, size = library.GGML_QUANT_SIZES[types[name]]
            num_bytes = int(np.prod(tensor.shape)) // block * size
            writer.add_tensor_info(name, tensor.shape, np.dtype(np.float32), num_bytes, types[name])
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        with shown_reading(theirs, "writing") as reading:
            for name, tensor in reading.items():
                values = np.ascontiguousarray(cast(tensor.read(), tensor.dtype, "F32"))
                writer.write_tensor_data(library.quants.quantize(values, types[name]))
        writer.close()
        (Path(scratch) / path.name).replace(path)


def _part(rule: Any, tensor: LazyTensor, index: int, name: str, config: Mapping[str, Any]) -> LazyTensor:
    shape, dtype = rule.shapes[index], "F32" if len(rule.shapes[index]) == 1 else tensor.dtype

    def read() -> np.ndarray:
        part = cast(rule.split(tensor.read(), index), tensor.dtype, dtype)
        return _reshaped(part, name, config, to_file=True)

    return LazyTensor(dtype, shape[::-1] if _is_transposed(name, config) else shape, read)


def _stored_type(name: str, tensor: LazyTensor, dtype: str | None) -> str:
    """Return the element type of a tensor in the GGUF file.

    Vectors, norms and position embeddings are float32. Other matrices keep their type if ``dtype`` is None.
    Otherwise they get the type ``dtype``, with two exceptions: matrices whose rows do not divide into blocks
    become float16, and the word embedding and the head become 8-bit.
    """
    if len(tensor.shape) == 1 or name.endswith("_norm.weight") or name.startswith("position_embd"):
        return "F32"
    if dtype is None:
        return tensor.dtype
    if tensor.shape[-1] % _BLOCK:
        return "F16"
    return "Q8_0" if name in ("token_embd.weight", "output.weight") else dtype.upper()


def _check_same(
    model: ModelConfig,
    metadata: Metadata,
    tensors: Mapping[str, LazyTensor],
    factors: Mapping[str, np.ndarray],
) -> None:
    """Raise CheckpointError if the GGUF file would be read as a network that differs from ``model``."""
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    try:
        found: Iterable[str] = differences(config_of(metadata, shapes, factors), model)
    except (CheckpointError, ConfigError) as error:
        found = [str(error)]
    if reasons := ", ".join(found):
        raise CheckpointError(f"this network cannot be written as GGUF: {reasons}")
