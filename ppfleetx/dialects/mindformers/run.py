"""Joint rules: what a run reads, what it starts from, how long it is, what it writes, how it generates."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path

from ppfleetx.config.errors import ConfigError
from ppfleetx.dialects.mindformers.plan import run_mode
from ppfleetx.dialects.reading import Reading
from ppfleetx.dialects.translation import Translation

_MODEL = "model.model_config"
_TEXT_FILES = (".txt", ".tokens", ".raw", ".text")
_CHECKPOINT_KEYS = ("resume_or_finetune_checkpoint", "load_checkpoint")
_SCHEDULES = {
    "polynomial": "linear",
    "linear": "linear",
    "cosine": "cosine",
    "constant_with_warmup": "constant",
}
_ALWAYS = {
    "Model.initializer_range": (0.01, "linears of MindFormers' GPT-2"),
    "Model.scale_output_init": (False, "MindFormers starts all linears alike"),
    "Model.scale_qk_by_layer_num": (False, "MindFormers does not"),
    "Model.position_embedding_type": ("learned_absolute", "GPT-2"),
    "Model.tie_word_embeddings": (True, "GPT-2"),
    "Model.norm_epsilon": (1e-5, "GPT-2"),
}
_END = 2**31 - 1


def network(reading: Reading, result: Translation) -> None:
    """What MindFormers' GPT-2 always has, its width and its length."""
    for key, (value, why) in _ALWAYS.items():
        result.put(key, value, why=why)
    width_key = next(
        (f"{_MODEL}.{name}" for name in ("embedding_size", "hidden_size") if f"{_MODEL}.{name}" in reading),
        None,
    )
    ratio_key = f"{_MODEL}.expand_ratio"
    if width_key is not None:
        width = reading.integer(width_key, least=1)
        ratio = reading.integer(ratio_key, 4, least=1)
        result.put(
            "Model.ffn_hidden_size",
            width * ratio,
            *reading.origins(width_key, ratio_key),
            why="width x expand_ratio",
        )
    length_key, positions_key = f"{_MODEL}.seq_length", f"{_MODEL}.max_position_embeddings"
    length = reading.integer(length_key, 1024, least=1)
    origins = reading.origins(positions_key) or reading.origins(length_key)
    result.put(
        "Model.max_position_embeddings",
        reading.integer(positions_key, length, least=1),
        *origins,
        why="" if origins else "the default of GPT2Config",
    )


def data(reading: Reading, result: Translation) -> None:
    """The corpus of the run mode."""
    mode = run_mode(reading)
    if mode == "predict":
        result.put("Model.module", "GPTGenerationModule", *reading.origins("run_mode"))
    elif mode == "eval":
        _evaluation(reading, result)
    else:
        _corpus(reading, result, "train_dataset", "Train")


def _corpus(reading: Reading, result: Translation, block: str, split: str) -> None:
    place = f"Data.{split}.dataset"
    directory_key, workers_key, length_key = (
        f"{block}.data_loader.dataset_dir",
        f"{block}.num_parallel_workers",
        f"{_MODEL}.seq_length",
    )
    if reading.value(directory_key) not in (None, ""):
        result.put(f"{place}.input_dir", reading.text(directory_key), *reading.origins(directory_key))
    shares = [1, 0, 0] if split == "Train" else [0, 1, 0]
    result.put(f"{place}.split", shares, why="the whole corpus")
    result.put(
        f"{place}.max_seq_len", reading.integer(length_key, 1024, least=1), *reading.origins(length_key)
    )
    workers = reading.integer(workers_key, least=0)
    result.put(f"Data.{split}.loader.num_workers", workers, *reading.origins(workers_key))


def _evaluation(reading: Reading, result: Translation) -> None:
    directory_key, length_key = "eval_dataset.data_loader.dataset_dir", f"{_MODEL}.seq_length"
    file = reading.value(directory_key)
    samples_key = "eval_dataset.data_loader.num_samples"
    samples = reading.integer(samples_key, -1, least=-1)
    if not (isinstance(file, str) and file.endswith(_TEXT_FILES)):
        _corpus(reading, result, "eval_dataset", "Eval")
        if reading.value("eval_dataset.drop_remainder") is False:
            result.notes.append("drop_remainder: of a corpus, the last incomplete global batch is left out")
        if samples > 0:
            batches = math.ceil(samples / reading.integer("runner_config.batch_size", 1, least=1))
            result.put("Engine.eval_iters", batches, *reading.origins(samples_key), why="whole batches")
        return
    if samples > 0:
        raise reading.error(samples_key, "a text file is evaluated whole")
    length = reading.integer(length_key, 1024, least=1)
    origins = reading.origins(length_key)
    result.put("Model.module", "GPTEvalModule", *reading.origins("run_mode"))
    result.put("Offline_Eval.eval_path", file, *reading.origins(directory_key))
    result.put("Offline_Eval.max_seq_len", length, *origins)
    result.put("Offline_Eval.overlapping_eval", length, *origins, why="windows do not overlap")
    size_key = "runner_config.batch_size"
    result.put("Offline_Eval.batch_size", reading.integer(size_key, 1, least=1), *reading.origins(size_key))


def checkpoint(reading: Reading, result: Translation) -> None:
    """What the run starts from."""
    mode = run_mode(reading)
    key, path = _given_checkpoint(reading)
    resumes = reading.flag("resume_training")
    if mode == "finetune" and path is None:
        raise ConfigError(
            "finetuning needs weights to begin with: give --load_checkpoint DIR",
            key="resume_or_finetune_checkpoint",
            place=result.place,
        )
    if mode in ("eval", "predict") and path is None:
        key = f"{_MODEL}.checkpoint_name_or_path"
        path = _directory_named(reading, key)
    if path is None:
        return
    begins = mode == "finetune" or (mode == "train" and resumes is False)
    native = "Engine.save_load.init_from" if begins else "Engine.save_load.ckpt_dir"
    result.put(native, path, *reading.origins(key, "resume_training"))


def _given_checkpoint(reading: Reading) -> tuple[str, str | None]:
    for key in _CHECKPOINT_KEYS:
        if reading.value(key) not in (None, ""):
            return key, reading.text(key)
    return _CHECKPOINT_KEYS[0], None


def _directory_named(reading: Reading, key: str) -> str | None:
    """``checkpoint_name_or_path`` where it is a path; a model's name would have to be downloaded."""
    name = reading.value(key)
    if name in (None, ""):
        return None
    name = reading.text(key)
    if os.sep in name or os.path.lexists(name):
        return name
    return None


def length(reading: Reading, result: Translation) -> None:
    """Epochs, and the course of the learning rate over them."""
    key = "runner_config.epochs"
    epochs = reading.integer(key, 1, least=1)
    why = "" if key in reading else "the default"
    result.put("Engine.run_mode", "epoch", *reading.origins(key), why=why)
    result.put("Engine.num_train_epochs", epochs, *reading.origins(key), why=why)
    result.put("Engine.max_steps", _END, why="the epochs end the run")
    result.put("Engine.eval_freq", 0, why="no evaluation during training")
    kind_key, end_key = "lr_schedule.type", "lr_schedule.lr_end"
    kind = reading.choice(kind_key, _SCHEDULES, "polynomial")
    result.put("Optimizer.lr.decay_style", _SCHEDULES[kind], *reading.origins(kind_key))
    rate_key = (
        "lr_schedule.learning_rate" if "lr_schedule.learning_rate" in reading else "optimizer.learning_rate"
    )
    result.put("Optimizer.lr.max_lr", reading.number(rate_key), *reading.origins(rate_key))
    ratio_key, steps_key = "lr_schedule.warmup_ratio", "lr_schedule.warmup_steps"
    if ratio_key in reading:
        result.put("Optimizer.lr.warmup_rate", reading.value(ratio_key), *reading.origins(ratio_key))
    else:
        result.put("Optimizer.lr.warmup_steps", reading.value(steps_key), *reading.origins(steps_key))
    if kind in ("polynomial", "cosine"):
        default = 1e-7 if kind == "polynomial" else 0.0
        result.put(
            "Optimizer.lr.min_lr", reading.number(end_key, default, least=0.0), *reading.origins(end_key)
        )


def writing(reading: Reading, result: Translation) -> None:
    """Log lines and checkpoints, as the callbacks say, and the profile."""
    for key, prefix in _callbacks(reading):
        kind = reading.value(key)
        if kind == "MFLossMonitor":
            name = f"{prefix}.per_print_times"
            result.put("Engine.logging_freq", reading.integer(name, 1, least=1), *reading.origins(key, name))
        if kind in ("CheckpointMointor", "CheckpointMonitor"):
            _saving(reading, result, key, prefix)
    first, last = "profile_start_step", "profile_stop_step"
    if first in reading or last in reading:
        steps = [reading.integer(first, 1, least=0), reading.integer(last, 10, least=1)]
        result.put("Profiler.scheduler", steps, *reading.origins(first, last))


def _callbacks(reading: Reading) -> Iterator[tuple[str, str]]:
    for key in reading.given:
        if key.startswith("callbacks.") and key.endswith(".type"):
            yield key, key.removesuffix(".type")


def _saving(reading: Reading, result: Translation, key: str, prefix: str) -> None:
    steps, keep, background, directory = (
        f"{prefix}.{name}"
        for name in ("save_checkpoint_steps", "keep_checkpoint_max", "async_save", "directory")
    )
    said = reading.origins(key)
    result.put(
        "Engine.save_load.save_steps", reading.integer(steps, 1, least=1), *said, *reading.origins(steps)
    )
    result.put_null("Engine.save_load.save_epoch", *said, why="save_steps counts")
    result.put("Engine.save_load.keep_max", reading.integer(keep, 5, least=1), *said, *reading.origins(keep))
    if reading.flag(background, False):
        result.put("Engine.save_load.async_save", True, *reading.origins(background))
    if directory in reading:
        result.replace("Engine.save_load.output_dir", reading.text(directory), *reading.origins(directory))


def generation(reading: Reading, result: Translation) -> None:
    """Prompts, and how many tokens follow them."""
    _room(reading, result)
    vocabulary, merges, end = (
        f"processor.tokenizer.{name}" for name in ("vocab_file", "merges_file", "eos_token")
    )
    if vocabulary in reading or merges in reading:
        for name, source in (("vocab_file", vocabulary), ("merges_file", merges), ("eos_token", end)):
            result.put(f"Data.tokenizer.{name}", reading.text(source), *reading.origins(source))
    if run_mode(reading) != "predict":
        return
    prompt = reading.text("input_data")
    if prompt is None:
        return
    native = "Generation.prompt_file" if _is_file(prompt) else "Generation.prompt"
    result.put(native, prompt, *reading.origins("input_data"))


def _room(reading: Reading, result: Translation) -> None:
    """New tokens: what ``max_decode_length`` leaves of the positions is known only with the prompts."""
    key, length_key = f"{_MODEL}.max_decode_length", f"{_MODEL}.seq_length"
    most, positions = reading.integer(key, least=1), reading.integer(length_key, 1024, least=1)
    if most is None:
        return
    if most < positions:
        result.put(
            "Generation.max_dec_len", most, *reading.origins(key), why="run_mindformer.py counts the prompt"
        )
        return
    why = "half of the positions are the prompt's; run_mindformer.py counts it"
    result.put("Generation.max_dec_len", max(1, positions // 2), *reading.origins(key, length_key), why=why)


def _is_file(prompt: str) -> bool:
    try:
        return Path(prompt).is_file()
    except (OSError, ValueError):  # a prompt that no file can be named
        return False
