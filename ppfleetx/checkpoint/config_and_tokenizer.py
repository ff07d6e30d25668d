"""A checkpoint's documents: ``config.yaml`` and the tokenizer files in ``tokenizer/``. The configuration
describes the model and its data, not the parallel plan or the machine of the run that trained it."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from ppfleetx.checkpoint.reader import Checkpoint
from ppfleetx.config.loader import CONFIG_FILE
from ppfleetx.config.resume_policy import Effect, effect_of
from ppfleetx.config.sections.root import ModelConfig, RunConfig
from ppfleetx.data.tokenizer.json_files import (
    CHAT_TEMPLATE,
    GENERATION_CONFIG,
    MERGES_FILE,
    NAMED_TEMPLATES,
    SENTENCEPIECE_FILE,
    SIDE_FILES,
    TOKENIZER_FILE,
    VOCAB_FILE,
    with_named_templates,
    write_files,
)
from ppfleetx.data.tokenizer.json_files import CONFIG as TOKENIZER_CONFIG
from ppfleetx.data.tokenizer.tokenizer import Tokenizer

TOKENIZER_DIR = "tokenizer"
TOKENIZER_FILES = (
    TOKENIZER_FILE,
    SENTENCEPIECE_FILE,
    VOCAB_FILE,
    MERGES_FILE,
    *(name for name in SIDE_FILES if name != GENERATION_CONFIG),
)
_HEAD = """\
# The model of this checkpoint: its network, the data it was trained and evaluated on, how it continues text.
# Nothing here depends on the plan or the machines of the run. The tokenizer lies beside this file.
#   ppfleetx generate THIS_DIRECTORY "Once upon a time"
"""
# Vocabulary padding changes the shapes in an exported model, but not the outputs.
_KEPT = ("vocab_size_divisible_unit", "lora")
PORTABLE_SECTIONS = ("Optimizer", "Generation", "Offline_Eval")
"""Sections that do not depend on the parallel plan or the machine. Parts of `Model` and `Data` are portable,
too."""
OF_ONE_CALL = ("prompt", "prompt_file", "seed")


def documents_of(cfg: RunConfig, tokenizer: Tokenizer | None) -> dict[str, bytes]:
    """Return the contents of ``config.yaml`` and the tokenizer files for a checkpoint, by path in the
    checkpoint. They are made from ``cfg`` and ``tokenizer``."""
    texts = {} if tokenizer is None else {**tokenizer.files(), **_learned_template(cfg, tokenizer)}
    documents = {f"{TOKENIZER_DIR}/{name}": text.encode() for name, text in texts.items()}
    return {CONFIG_FILE: portable_config(cfg, tokenizer).encode(), **documents}


def _learned_template(cfg: RunConfig, tokenizer: Tokenizer) -> dict[str, str]:
    """Return the chat template of the training data, as {file name: template}. The result is empty if the
    training data are not chats, or if their template is the tokenizer's default template."""
    dataset = None if cfg.Data.Train is None else cfg.Data.Train.dataset
    if dataset is None or dataset.name != "ChatDataset":
        return {}
    from ppfleetx.data.chat.templates import DEFAULT, template_of  # only chats need Jinja

    template = template_of(dataset, tokenizer)
    return (
        {} if template.source == tokenizer.chat_templates.get(DEFAULT) else {CHAT_TEMPLATE: template.source}
    )


def documents_in(checkpoint: Checkpoint) -> dict[str, bytes]:
    """Read the contents of a checkpoint's ``config.yaml`` and tokenizer files, by path in the checkpoint."""
    held = ((path, checkpoint.document(path)) for path in checkpoint.manifest.documents)
    return {path: content for path, content in held if content is not None}


def portable_config(cfg: RunConfig, tokenizer: Tokenizer | None) -> str:
    """Return ``cfg`` as YAML, without the keys that describe the parallel plan or the machine, and without
    keys that belong to one command, such as the prompt."""
    plain = cfg.model_dump(mode="json")
    data = {key: value for key, value in plain["Data"].items() if value is not None}
    plugins = {"plugins": list(cfg.Global.plugins)} if cfg.Global.plugins else {}
    data["tokenizer"] = None if tokenizer is None else {"eos_token": tokenizer.eod_token}
    size = cfg.batch.micro_batch_size
    tree: dict[str, Any] = {
        "Global": {"seed": cfg.Global.seed, "local_batch_size": size, "micro_batch_size": size, **plugins},
        "Model": portable_model(plain["Model"]),
        "Data": data,
        **{name: _without_derived(plain[name], f"{name}.", cfg) for name in PORTABLE_SECTIONS},
    }
    for key in OF_ONE_CALL:
        del tree["Generation"][key]
    # Distillation and pruning happen only in training, but quantization describes the saved weights.
    compress = {**plain["Compress"], "Distill": None, "Prune": None}
    if compress != type(cfg.Compress)().model_dump(mode="json"):
        tree["Compress"] = compress
    return _HEAD + yaml.safe_dump(tree, sort_keys=False, allow_unicode=True, width=110)


def portable_model(section: Mapping[str, Any]) -> dict[str, Any]:
    """Return a ``Model`` section without unknown keys, and without keys that affect only speed and memory."""
    return {
        key: value
        for key, value in section.items()
        if key in ModelConfig.model_fields
        and (key in _KEPT or effect_of(f"Model.{key}") is not Effect.NOTHING)
    }


def _without_derived(section: dict[str, Any], prefix: str, cfg: RunConfig) -> dict[str, Any]:
    return {
        key: _without_derived(value, f"{prefix}{key}.", cfg) if isinstance(value, dict) else value
        for key, value in section.items()
        if f"{prefix}{key}" not in cfg.derived
    }


def tokenizer_files(directory: Path) -> list[Path]:
    return [path for name in TOKENIZER_FILES if (path := directory / name).is_file()]


def copy_tokenizer(source: Path, target: Path) -> None:
    """Copy the tokenizer files and ``generation_config.json`` from directory ``source`` to ``target``. Chat
    templates in ``additional_chat_templates/`` are copied into ``tokenizer_config.json``."""
    target.mkdir(parents=True, exist_ok=True)
    for file in (*tokenizer_files(source), source / GENERATION_CONFIG):
        if file.is_file() and source.resolve() != target.resolve():
            shutil.copyfile(file, target / file.name)
    if source.resolve() != target.resolve() and (source / NAMED_TEMPLATES).is_dir():
        _list_templates(source, target)


def _list_templates(source: Path, target: Path) -> None:
    names = (TOKENIZER_CONFIG, CHAT_TEMPLATE)
    texts = {name: (target / name).read_text("utf-8") for name in names if (target / name).is_file()}
    listed = with_named_templates(texts, source)
    write_files(listed, target)
    if CHAT_TEMPLATE not in listed:
        (target / CHAT_TEMPLATE).unlink(missing_ok=True)  # its content is in `listed` now
