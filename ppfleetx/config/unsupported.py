"""What a valid configuration may ask for and this program cannot run yet, in one place.

A feature that arrives deletes its lines here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Any

from ppfleetx.config.reading.files import is_of_a_model
from ppfleetx.config.reading.tree import is_argument
from ppfleetx.config.registries import OPTIMIZERS, SCHEDULES
from ppfleetx.config.sections.generation import READ_BY
from ppfleetx.config.sections.root import RunConfig

_SHIPPED = Path(__file__).resolve().parents[1] / "configs"
_MANIFEST = "manifest.json"  # what lies beside it is part of a checkpoint


def not_supported_reasons(cfg: RunConfig, device: str) -> list[str]:
    """Sentences, each naming its key, for what ``cfg`` asks for and cannot be run; empty: all of it can.

    Args:
        cfg: a loaded configuration.
        device: the kind of device that the run has resolved to.
    """
    precision = cfg.Engine.mix_precision
    table: list[tuple[bool, str]] = [
        (
            device == "cpu" and precision.enable,
            f"Engine.mix_precision.enable = True: Paddle has no {precision.dtype} kernels for the CPU; "
            "compute in float32 with -o Engine.mix_precision.enable=False",
        ),
    ]
    return [reason for applies, reason in table if applies]


def missing(cfg: RunConfig) -> list[str]:
    """Sentences, each naming its key, for what a run with ``cfg`` needs and the configuration leaves open."""
    splits = {name: getattr(cfg.Data, name) for name in ("Train", "Eval", "Test")}
    texts = [name for name, split in splits.items() if split is not None and split.dataset.is_texts]
    if not texts or cfg.Data.tokenizer is not None:
        return []
    return [f"Data.tokenizer: the texts of Data.{texts[0]} need one (-o Data.tokenizer.dir=DIR)"]


def without_effect(cfg: RunConfig) -> list[str]:
    """Sentences, each naming its keys, for what was asked for and changes nothing in this run.

    Speed options that are not built yet are named whoever asks for them. Keys that another key switches off
    are named when the user wrote them (in a file of his own, or with -o), not when a shipped file or the
    configuration in a checkpoint did.
    """
    reasons = [f"{key} = True {what}" for key, what in _NOT_BUILT if _value(cfg, key)]
    origins = cfg.origins
    for rule in _SWITCHED_OFF:
        keys = [key for key in rule.keys if _is_written(cfg, key, origins)] if rule.applies(cfg) else []
        if keys:
            verb = "has" if len(keys) == 1 else "have"
            reasons.append(f"{', '.join(keys)} {verb} no effect: {rule.why}")
    return reasons


_NOT_BUILT = (
    (
        "Model.fused_linear",
        "changes nothing: on a GPU Paddle always adds the bias within the matrix product, on a CPU never",
    ),
)


@dataclass(frozen=True)
class SwitchedOff:
    """``keys`` have no effect in a configuration that ``applies`` accepts, and why."""

    keys: tuple[str, ...]
    applies: Callable[[RunConfig], bool]
    why: str


def _keys(section: str, names: str) -> tuple[str, ...]:
    return tuple(f"{section}.{name}" for name in names.split())


_SWITCHED_OFF = (
    SwitchedOff(
        _keys("Optimizer", "beta1 beta2 epsilon weight_decay weight_decay_schedule"),
        lambda cfg: cfg.Optimizer.name == "SGD",
        "Optimizer.name = SGD is plain gradient descent",
    ),
    *(
        SwitchedOff(
            (f"Optimizer.{key}",),
            lambda cfg, key=key: (
                cfg.Optimizer.name != "SGD" and key not in OPTIMIZERS.traits(cfg.Optimizer.name).reads
            ),
            "Optimizer.name is an optimizer that does not read it",
        )
        for key in ("beta1", "beta2", "epsilon", "weight_decay")
    ),
    SwitchedOff(
        ("Optimizer.weight_decay",),
        lambda cfg: cfg.Optimizer.name != "SGD" and cfg.Optimizer.weight_decay_schedule is not None,
        "Optimizer.weight_decay_schedule says it",
    ),
    SwitchedOff(
        ("Optimizer.lr.min_lr",),
        lambda cfg: not SCHEDULES.traits(cfg.Optimizer.lr.decay_style).decays,
        "Optimizer.lr.decay_style = constant stays at max_lr",
    ),
    SwitchedOff(
        ("Optimizer.lr.wsd_decay_style",),
        lambda cfg: cfg.Optimizer.lr.decay_style != "wsd",
        "Optimizer.lr.decay_style is not wsd",
    ),
    *(
        SwitchedOff(
            tuple(f"Generation.{key}" for key in keys),
            lambda cfg, strategy=strategy: cfg.Generation.decode_strategy != strategy,
            f"Generation.decode_strategy is not {strategy}",
        )
        for strategy, keys in READ_BY.items()
    ),
    SwitchedOff(
        ("Generation.prompt_lookup_num_tokens",),
        lambda cfg: cfg.Generation.decode_strategy != "greedy_search" or not cfg.Generation.use_cache,
        "tokens are guessed in greedy search with a cache only",
    ),
    SwitchedOff(
        ("Generation.diversity_rate",),
        lambda cfg: cfg.Generation.decode_strategy == "beam_search" and cfg.Generation.num_beam_groups == 1,
        "Generation.num_beam_groups is 1",
    ),
    SwitchedOff(
        _keys("Model", "attn_post_norm_scale ffn_post_norm_scale"),
        lambda cfg: not cfg.Model.sandwich_norm,
        "Model.sandwich_norm is False",
    ),
    SwitchedOff(
        _keys("Model", "recompute_granularity recompute_layers no_recompute_layers recompute_interval"),
        lambda cfg: not cfg.Model.use_recompute,
        "Model.use_recompute is False",
    ),
    SwitchedOff(
        ("Engine.num_train_epochs", "Engine.save_load.save_epoch"),
        lambda cfg: cfg.Engine.run_mode == "step",
        "Engine.run_mode = step counts steps",
    ),
    SwitchedOff(
        ("Engine.save_load.save_steps",),
        lambda cfg: cfg.Engine.run_mode == "epoch" and cfg.Engine.save_load.save_epoch is not None,
        "Engine.run_mode = epoch saves by Engine.save_load.save_epoch",
    ),
    SwitchedOff(
        ("Model.num_classes",),
        lambda cfg: not cfg.Model.task.classifies,
        "only GPTFinetuneModule has classes",
    ),
    SwitchedOff(
        ("Engine.eval_iters",),
        lambda cfg: cfg.Data.Eval is not None and not cfg.Data.Eval.dataset.is_corpus,
        "Data.Eval.dataset.name is read to its end in each evaluation",
    ),
    SwitchedOff(
        ("Data.Test",),
        lambda cfg: not cfg.Model.task.classifies,
        "only tools/eval.py with GPTFinetuneModule reads the test set (tools/build_index.py prepares it)",
    ),
    SwitchedOff(
        ("Offline_Eval",),
        lambda cfg: not cfg.Model.task.offline_evaluation,
        "Model.module is not GPTEvalModule; tools/eval.py evaluates on Data.Eval",
    ),
    SwitchedOff(
        _keys("Offline_Eval", "overlapping_eval detokenizer"),
        lambda cfg: cfg.Model.task.offline_evaluation and cfg.Offline_Eval.cloze_eval,
        "Offline_Eval.cloze_eval is True",
    ),
    SwitchedOff(
        ("Offline_Eval.cloze_strict",),
        lambda cfg: cfg.Model.task.offline_evaluation and not cfg.Offline_Eval.cloze_eval,
        "Offline_Eval.cloze_eval is False",
    ),
)


def _is_written(cfg: RunConfig, key: str, origins: dict[str, str]) -> bool:
    """Whether the user asked for ``key`` (a section: for anything in it) himself.

    A file that only repeats the default asks for nothing: ``config.yaml`` of a run holds every key.
    """
    places = [place for name, place in origins.items() if name == key or name.startswith(f"{key}.")]
    value = _value(cfg, key)
    if value is None:
        return False
    if any(map(is_argument, places)):
        return True
    return value != _default(cfg, key) and not all(_is_given(place) for place in places)


def _is_given(place: str) -> bool:
    """Whether a place is in a file that comes with the program, or with the weights of a model."""
    if is_of_a_model(place):
        return True
    file = Path(place.rpartition(":")[0])
    return file.resolve().is_relative_to(_SHIPPED) or (file.parent / _MANIFEST).is_file()


def _value(cfg: RunConfig, key: str) -> Any:
    return reduce(getattr, key.split("."), cfg)


def _default(cfg: RunConfig, key: str) -> Any:
    section, _, name = key.rpartition(".")
    parent = _value(cfg, section) if section else cfg
    return type(parent).model_fields[name].get_default(call_default_factory=True)
