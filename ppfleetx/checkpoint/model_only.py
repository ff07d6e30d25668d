"""Read and write checkpoints of ppfleetx that contain only weights, not training state."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml

from ppfleetx.checkpoint.config_and_tokenizer import (
    OF_ONE_CALL,
    TOKENIZER_DIR,
    copy_tokenizer,
    documents_of,
    portable_config,
)
from ppfleetx.checkpoint.lazy_tensors import LazyTensor
from ppfleetx.checkpoint.manager import save_checkpoint
from ppfleetx.checkpoint.manifest import MAX_DOCUMENT_BYTES, Manifest
from ppfleetx.checkpoint.reader import Checkpoint
from ppfleetx.checkpoint.resolve_checkpoint import open_named
from ppfleetx.checkpoint.slices import OPTIMIZER, TensorSlice
from ppfleetx.checkpoint.state_dict import MASTER_WEIGHT
from ppfleetx.checkpoint.weights import Weights, lazy, shown_reading, slices_of
from ppfleetx.config.errors import CheckpointError, ConfigError, DataError
from ppfleetx.config.loader import CONFIG_FILE, load_config
from ppfleetx.config.parallel_plan import ParallelPlan
from ppfleetx.config.reading.parse import made_sections, model_in, parse_yaml
from ppfleetx.config.reading.tree import plain_value
from ppfleetx.config.sections.generation import GenerationConfig
from ppfleetx.config.sections.model import ModelConfig
from ppfleetx.config.sections.root import RunConfig
from ppfleetx.config.validate import section_of
from ppfleetx.data.tokenizer.json_files import GENERATION_CONFIG
from ppfleetx.data.tokenizer.tokenizer import Tokenizer
from ppfleetx.utils.input_files import read_bounded
from ppfleetx.utils.log import get_logger
from ppfleetx.utils.output_files import atomic_write

# ---- in


def read_ppfleetx(path: str | Path, *, masters: bool = False, few_bits: bool = False) -> Weights:
    """Read the weights of a checkpoint of ppfleetx.

    Args:
        path: any path that `Engine.save_load.ckpt_dir` accepts.
        masters: whether to read float32 master weights where the checkpoint has them.
        few_bits: whether the checkpoint may be quantized. Quantized weights are returned as stored.

    Raises CheckpointError if the checkpoint cannot be read, or is quantized and ``few_bits`` is False.
    """
    checkpoint = open_named(path)
    manifest = checkpoint.manifest
    if not few_bits:
        _refuse_quantized(checkpoint)
    tensors = {}
    for name in checkpoint.names():
        use_master = masters and (OPTIMIZER, name, MASTER_WEIGHT) in manifest.tensors
        tensors[name] = lazy(checkpoint, name, *((OPTIMIZER, MASTER_WEIGHT) if use_master else ()))
    source = manifest.state.get("source") or {}
    return Weights(
        str(checkpoint.path),
        tensors,
        model=model_section(manifest),
        vocab_size=manifest.vocab_size,
        epoch=manifest.epoch,
        step=manifest.step,
        source=source,
        tokenizer_dir=find_tokenizer_dir(checkpoint.path),
        generation=generation_section(manifest.config),
    )


def _refuse_quantized(checkpoint: Checkpoint) -> None:
    entries = ((name, checkpoint.entry(name).dtype) for name in checkpoint.names())
    small = next((name for name, dtype in entries if dtype in ("I8", "U8")), None)
    if small is not None:
        raise CheckpointError(
            f"checkpoint {checkpoint.path} is quantized ({small} has 8 bits or fewer) and is not converted; "
            "convert the checkpoint it was made from"
        )


def model_section(manifest: Manifest) -> dict[str, Any]:
    """Return the `Model` section of the configuration in a manifest; empty if there is none."""
    config = manifest.config
    if isinstance(config, str):
        node = parse_yaml(config, "the configuration in the manifest")
        config = None if node is None else plain_value(node)
    section = config.get("Model") if isinstance(config, Mapping) else None
    return dict(section) if isinstance(section, Mapping) else {}


def generation_section(config: Mapping[str, Any] | str | None) -> dict[str, Any]:
    """Return the `Generation` section of the configuration in a manifest, without keys that belong to one
    command, such as the prompt. Invalid keys are left out with a warning."""
    section = config.get("Generation") if isinstance(config, Mapping) else None
    if not isinstance(section, Mapping):
        return {}
    valid, errors = valid_generation_keys({k: value for k, value in section.items() if k not in OF_ONE_CALL})
    for error in errors:
        get_logger().warning(f"generation defaults of the source are left out: {error}")
    return valid


def valid_generation_keys(keys: Mapping[str, Any]) -> tuple[dict[str, Any], list[ConfigError]]:
    """Return the valid keys of a `Generation` section with their values, and the errors for the invalid ones.
    If an error concerns several keys together, all keys except ``decode_strategy`` are left out."""
    good, errors = dict(keys), []
    while True:
        try:
            section = section_of(GenerationConfig, good)
        except ConfigError as error:
            errors.append(error)
            if good.pop(str(error.key), None) is None:  # the error concerns several keys
                good = {key: value for key, value in good.items() if key == "decode_strategy"}
        else:
            return section.model_dump(mode="json", include=good.keys()), errors


def find_tokenizer_dir(checkpoint: Path) -> Path | None:
    places = (checkpoint / TOKENIZER_DIR, checkpoint.resolve().parent / TOKENIZER_DIR)
    return next((place for place in places if place.is_dir()), None)


# ---- out


def save_weights(
    output: str | Path,
    cfg: RunConfig,
    tensors: Iterable[TensorSlice],
    *,
    tokenizer: Tokenizer | None,
    source: Mapping[str, Any] | None = None,
    epoch: int = 0,
    step: int = 0,
    documents: Mapping[str, bytes] | None = None,
) -> Path:
    """Write a checkpoint that contains only weights, and return its step directory.

    Args:
        cfg: the configuration to store with the weights.
        source: the origin of the weights, such as their format, to store in the checkpoint's state.
        documents: ``config.yaml`` and tokenizer files, by path; None: made from ``cfg`` and ``tokenizer``.
    """
    return save_checkpoint(
        output,
        epoch=epoch,
        step=step,
        tensors=tensors,
        state={"source": dict(source)} if source is not None else {},
        plan=asdict(ParallelPlan()),
        config=cfg.model_dump(mode="json"),
        fingerprints={"tokenizer": tokenizer.fingerprint} if tokenizer is not None else {},
        vocab_size=cfg.Model.vocab_size,
        documents=documents_of(cfg, tokenizer) if documents is None else documents,
    )


def write_ppfleetx(
    weights: Weights, tensors: Mapping[str, LazyTensor], model: ModelConfig, output: str | Path
) -> Path:
    """Write converted weights as a checkpoint. Returns its step directory. ``config.yaml`` and the tokenizer,
    if there is one, are also written into ``output``.

    Args:
        weights: the metadata to store, such as step, source and tokenizer. The attribute ``weights.tensors``
            is not used.
        tensors: all parameters of ``model``, with vocabulary padding.
        output: the output directory.
    """
    output = Path(output)
    output.mkdir(parents=True, exist_ok=True)
    tokenizer = None
    if weights.tokenizer_dir is not None:
        copy_tokenizer(weights.tokenizer_dir, output / TOKENIZER_DIR)
        _add_generation_config(output / TOKENIZER_DIR, weights.source)
        tokenizer = load_tokenizer(output / TOKENIZER_DIR, weights.tokenizer_dir)
    generation = dict(weights.generation)
    if tokenizer is None and (ends := _end_ids(weights.source)):  # otherwise the tokenizer has them
        generation["eos_token_id"] = ends
    _write_config(output, model, tokenizer, generation)
    cfg = load_config(made_sections(output / CONFIG_FILE, model_in(weights.place)))
    with shown_reading(tensors, "writing") as shown:
        return save_weights(
            output,
            cfg,
            slices_of(shown),
            tokenizer=tokenizer,
            source=weights.source,
            epoch=weights.epoch,
            step=weights.step,
            documents={
                CONFIG_FILE: portable_config(cfg, tokenizer).encode(),
                **_files_of(output / TOKENIZER_DIR),
            },
        )


def _end_ids(source: Mapping[str, Any]) -> list[int]:
    said = source.get("generation_config", source.get("config"))
    given = said.get("eos_token_id") if isinstance(said, Mapping) else None
    ids = given if isinstance(given, list) else [given]
    return [one for one in ids if type(one) is int and one >= 0]


def _add_generation_config(directory: Path, source: Mapping[str, Any]) -> None:
    """Write the special token ids of a model's ``config.json`` into ``directory``, as
    ``generation_config.json``. Nothing is written if ``directory`` already has this file, or if the
    ``config.json`` has no ``eos_token_id``.

    Args:
        source: a dict whose key ``config``, if present, has the content of the ``config.json``.
    """
    path, config = directory / GENERATION_CONFIG, source.get("config")
    if path.exists() or not isinstance(config, Mapping) or config.get("eos_token_id") is None:
        return
    keys = ("bos_token_id", "eos_token_id", "pad_token_id")
    ids = {key: config[key] for key in keys if config.get(key) is not None}
    with atomic_write(path, "w") as file:
        file.write(json.dumps({"_from_model_config": True, **ids}, indent=2) + "\n")


def load_tokenizer(directory: Path, source: Path | None = None) -> Tokenizer | None:
    """Load the tokenizer in ``directory``. If ppfleetx does not support it, log a warning and return None.
    ``source`` is the directory from which it was copied, for the warning; None: it was not copied."""
    try:
        return Tokenizer.load(directory)
    except DataError as error:
        why = str(error).replace(str(directory), str(source or directory))
        get_logger().warning(f"the tokenizer is copied, but cannot be used here: {why}")
        return None


def _files_of(tokenizer_dir: Path) -> dict[str, bytes]:
    files = sorted(path for path in tokenizer_dir.glob("*") if path.is_file())
    return {f"{TOKENIZER_DIR}/{path.name}": read_bounded(path, MAX_DOCUMENT_BYTES) for path in files}


def _write_config(
    output: Path, model: ModelConfig, tokenizer: Tokenizer | None, generation: Mapping[str, Any]
) -> None:
    tree: dict[str, Any] = {
        "Global": {"local_batch_size": 1},
        "Model": model.model_dump(mode="json", exclude_unset=True),
    }
    if generation:
        tree["Generation"] = dict(generation)
    if tokenizer is not None:
        # The path is absolute, so that it works from any directory. If the directory is moved, programs that
        # load the checkpoint use the tokenizer beside it.
        place = {"dir": str((output / TOKENIZER_DIR).resolve()), "eos_token": tokenizer.eod_token}
        tree["Data"] = {"tokenizer": place}
    with atomic_write(output / CONFIG_FILE, "w") as file:
        file.write("# Made by ppfleetx convert; add the sections of your run, or use it as _base_.\n")
        file.write(yaml.safe_dump(tree, sort_keys=False, allow_unicode=True))
