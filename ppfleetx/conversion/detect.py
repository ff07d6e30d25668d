"""Recognize checkpoints of other programs, and tell the user how to convert them."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable
from pathlib import Path

from ppfleetx.checkpoint.manifest import BEST_FILE, LATEST_FILE, MANIFEST_FILE, MARKER_FILE, is_rank_directory
from ppfleetx.config.errors import CheckpointError, ConfigError
from ppfleetx.config.sections.root import RunConfig
from ppfleetx.conversion.fleetx import MODEL_FILE as FLEETX_FILE
from ppfleetx.conversion.fleetx import is_fleetx
from ppfleetx.conversion.gguf import is_gguf
from ppfleetx.conversion.huggingface.config_import import model_keys, of_paddle
from ppfleetx.conversion.huggingface.read_files import (
    ADAPTER_CONFIG,
    CONFIG,
    PADDLE_CONFIG,
    PADDLE_INDEX,
    PADDLE_PICKLE,
    PICKLE,
    PICKLE_INDEX,
    read_hf_config,
    read_stored,
    without_weights,
)
from ppfleetx.conversion.megatron import MODEL_FILES as MEGATRON_FILES
from ppfleetx.conversion.megatron import TRACKER
from ppfleetx.conversion.safetensors_file import INDEX, SINGLE

_CONFIGS = (CONFIG, PADDLE_CONFIG)
_WEIGHTS = (INDEX, SINGLE, PICKLE_INDEX, PICKLE, PADDLE_INDEX, PADDLE_PICKLE)
_WEIGHT_FILE = re.compile(r"(.*\.safetensors|pytorch_model.*\.bin|model_state.*\.pdparams)(\.index\.json)?")
HUB = "hf:"
"""Prefix of names of models on the Hugging Face hub. Such names are accepted in place of directories."""
_ITERATION = re.compile(r"iter_\d+|release")


_SUFFIXES = {
    ".pdparams": f"a file of Paddle's. What is read are FleetX's {FLEETX_FILE} (name its directory) and "
    f"{PADDLE_PICKLE} of PaddleNLP beside its {CONFIG} (ppfleetx convert --from hf)",
    **dict.fromkeys(
        (".pt", ".pth", ".ckpt", ".bin"),
        "a file of PyTorch's. ppfleetx convert reads directories of Hugging Face (--from hf) and "
        "of Megatron-LM (--from megatron)",
    ),
}
"""File suffix -> description of a weight file with this suffix, for messages."""


def is_hugging_face(path: Path) -> bool:
    """Return whether ``path`` is a model directory of Hugging Face or PaddleNLP."""
    return path.is_dir() and not _is_ours(path) and _has(path, _CONFIGS) and _has(path, _WEIGHTS)


def _has(directory: Path, names: Iterable[str]) -> bool:
    return any((directory / name).is_file() for name in names)


def described(path: Path) -> str | None:
    """Return a message for the user: what the checkpoint ``path`` is, and how to convert it. None if
    ``path`` is not recognized, or needs no conversion."""
    if str(path).startswith(HUB):
        return (
            f"{path} is a model of the Hugging Face hub, which is downloaded where a model is an argument "
            f"(ppfleetx finetune --from {path}). Here, convert it first: ppfleetx convert --from hf --to "
            f"ppfleetx --input {path} --output DIR, and name DIR"
        )
    if _is_ours(path):
        return None
    if path.is_file():
        return _file(path)
    if not path.is_dir() or is_fleetx(path) or is_rank_directory(path.name):
        return None
    return _megatron(path) or _distributed(path) or _hugging_face(path) or _other(path)


def refuse_foreign(cfg: RunConfig) -> None:
    """Raise ConfigError if a configuration names weights that must be converted first."""
    for key, place in cfg.weight_sources():
        if sentence := described(Path(place)):
            raise ConfigError(sentence, key=key, value=place, place=cfg.origins.get(key))


def _is_ours(path: Path) -> bool:
    """Return whether ``path`` is an output directory, a step directory or a rank directory of ppfleetx."""
    return (path / LATEST_FILE).exists() or any(
        (place / name).exists() for place in (path, path.parent) for name in (MANIFEST_FILE, MARKER_FILE)
    )


def _convert(path: Path, source: str, what: str) -> str:
    output = f"{path.resolve().name}-ppfleetx"
    command = f"ppfleetx convert --from {source} --to ppfleetx --input"
    return (
        f"{path} is {what}. Convert it first: {command} {shlex.quote(str(path))} "
        f"--output {shlex.quote(output)}, and name {output} here"
    )


def _file(path: Path) -> str | None:
    name = path.name
    if name == FLEETX_FILE:
        return f"{path} is a file of FleetX's. Name its directory, which needs no conversion: {path.parent}"
    directory = path.parent
    if name in MEGATRON_FILES:
        return _part(path, _megatron(directory.parent) or _megatron(directory))
    if path.suffix == ".distcp":
        return _part(path, _megatron(directory) or _distributed(directory))
    if _WEIGHT_FILE.fullmatch(name) or name in _CONFIGS:
        if _has(directory, _CONFIGS):
            return _part(path, _hugging_face(directory))
        return (
            f"{path} holds only tensors, and nothing describes their network. With the model's {CONFIG} "
            "beside it, its directory can be converted: ppfleetx convert --from hf"
        )
    if is_gguf(path):
        return _convert(path, "gguf", "a GGUF file")
    if path.suffix in _SUFFIXES:
        return f"{path} is {_SUFFIXES[path.suffix]}"
    if name in (LATEST_FILE, BEST_FILE):
        return None
    return f"{path} is a file. A checkpoint is a directory, or the file {LATEST_FILE} or {BEST_FILE} of a run"


def _part(path: Path, whole: str | None) -> str | None:
    return None if whole is None else f"{path} is one file of a checkpoint: {whole}"


def _megatron(path: Path) -> str | None:
    iterations = [child for child in path.glob("*") if _ITERATION.fullmatch(child.name) and child.is_dir()]
    places = [path, *iterations]
    if any(_has(rank, MEGATRON_FILES) for place in places for rank in (place, *place.glob("mp_rank_*"))):
        return _convert(path, "megatron", "a checkpoint of Megatron-LM")
    is_numbered = any(child.name.startswith("iter_") for child in iterations)
    if is_numbered or (path / TRACKER).is_file() or (path / "common.pt").is_file():
        if any(place.glob("*.distcp") for place in places):
            return (
                f"{path} is a checkpoint of Megatron-LM in its distributed format (.distcp), which is not "
                "read. Save it there in the classic one (--ckpt-format or --ckpt-convert-format torch), and "
                "convert that: ppfleetx convert --from megatron"
            )
        return f"{path} looks like a checkpoint of Megatron-LM, but has no weight files"
    return None


def _distributed(path: Path) -> str | None:
    if next(path.glob("*.distcp"), None) is None:
        return None
    if next(path.glob("*.metadata"), None) is not None and not (path / ".metadata").is_file():
        return (
            f"{path} is a distributed checkpoint of Paddle (.distcp), which is not read. Save the model for "
            "Hugging Face where it was trained (PaddleFormers: save_to_hf=True), and convert that: "
            "ppfleetx convert --from hf"
        )
    return (
        f"{path} is a distributed checkpoint of PyTorch (.distcp), which is not read. Save the model for "
        "Hugging Face, or for Megatron-LM in its classic format, with the program that wrote it, and convert "
        "that: ppfleetx convert"
    )


def _hugging_face(path: Path) -> str | None:
    if parts := sorted(path.glob("model_state.tp*.pdparams")):
        return (
            f"{path} holds tensor-parallel parts of PaddleNLP ({parts[0].name}, ...), which are not read. "
            "Merge them with PaddleNLP, and convert the whole model: ppfleetx convert --from hf"
        )
    if not _has(path, _CONFIGS):
        if (path / ADAPTER_CONFIG).is_file():
            return f"{path} holds adapters of PEFT and no model. Merge them with their model and convert that"
        if _has(path, _WEIGHTS):
            return (
                f"{path} holds weights and no {CONFIG}, which would describe their network. With "
                "it, the directory can be converted: ppfleetx convert --from hf"
            )
    elif not _has(path, _WEIGHTS):
        try:
            is_theirs = "model_type" in read_hf_config(path)
        except CheckpointError:
            return None
        return without_weights(path) if is_theirs else None
    if not is_hugging_face(path):
        return None
    try:
        config = read_hf_config(path)
        model_keys(config)
        is_of_paddle = of_paddle(config) or read_stored(path).is_paddle
    except CheckpointError as error:
        return f"{path} is a model of another program that cannot be converted: {error}"
    whose = "PaddleNLP or PaddleFormers" if is_of_paddle else "Hugging Face"
    return _convert(path, "hf", f"a {config['model_type']} of {whose}")


def _other(path: Path) -> str | None:
    if (path / "snapshots").is_dir() and (path / "refs").is_dir():
        found = next((child for child in sorted((path / "snapshots").glob("*")) if child.is_dir()), None)
        inner = None if found is None else _hugging_face(found)
        return None if inner is None else f"{path} is Hugging Face's cache of a model: {inner}"
    if _has(path, ("model.pdiparams", "rank_0/model.pdiparams")):
        return (
            f"{path} is an exported program. It is run by ppfleetx infer (Inference.model_dir); for "
            "anything else, name the checkpoint that it was made from"
        )
    return None
