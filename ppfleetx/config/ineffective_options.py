"""Find options that have no effect in a run, and required keys or libraries that are missing."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ppfleetx.config.errors import ConfigError
from ppfleetx.config.reading.parse import is_of_a_model
from ppfleetx.config.reading.tree import is_argument
from ppfleetx.config.registries import DATASETS, LOGGERS, OPTIMIZERS, SCHEDULES, OptimizerTraits
from ppfleetx.config.section import Section
from ppfleetx.config.sections.compress import PruneConfig, QuantizationConfig
from ppfleetx.config.sections.data import MODES, DatasetConfig, DataSplitConfig
from ppfleetx.config.sections.engine import MixedPrecisionConfig, ProfilerConfig, SpikeConfig
from ppfleetx.config.sections.generation import READ_BY
from ppfleetx.config.sections.optimizer import MuonConfig
from ppfleetx.config.sections.root import RunConfig
from ppfleetx.config.shipped import CONFIGS
from ppfleetx.config.yaml_dump import is_record

_MANIFEST = "manifest.json"  # a configuration in the same directory is part of a checkpoint


def without_effect(cfg: RunConfig) -> list[str]:
    """Return messages about options that the user set but that have no effect in this run. Each message gives
    the reason.

    Only known cases are found. An option that a file sets to its default is not listed. Each option is listed
    once, with the reason of the first rule that applies to it.
    """
    reasons, origins = [], cfg.origins
    named: set[str] = set()
    for rule in SWITCHED_OFF:
        if not rule.applies(cfg):
            continue
        if keys := [key for key in rule.keys if key not in named and _is_written(cfg, key, origins)]:
            named.update(keys)
            verb = "has" if len(keys) == 1 else "have"
            reasons.append(f"{', '.join(keys)} {verb} no effect: {rule.why}")
    return reasons


@dataclass(frozen=True)
class SwitchedOff:
    """The rule that ``keys`` have no effect in configurations for which ``applies`` is true.

    Attributes:
        why: the reason, for messages.
    """

    keys: tuple[str, ...]
    why: str
    applies: Callable[[RunConfig], bool]


def _off(keys: str, why: str, applies: Callable[[RunConfig], bool]) -> SwitchedOff:
    """Make the rule that ``keys`` have no effect if ``applies`` is true, for the reason ``why``.

    ``keys`` has the form ``Section: key key ...``, or consists of dotted keys separated by spaces. The name
    of a section stands for all keys in it.
    """
    section, colon, names = keys.partition(": ")
    dotted = tuple(f"{section}.{name}" for name in names.split()) if colon else tuple(keys.split())
    return SwitchedOff(dotted, why, applies)


def _off_while(keys: str, key: str, value: Any, consequence: str = "") -> SwitchedOff:
    """Make a rule that ``keys`` have no effect while ``key`` has ``value``."""
    why = f"{key} is {'null' if value is None else value}{consequence}"
    return _off(keys, why, lambda cfg: cfg.value_of(key) == value)


def _off_unless(keys: str, key: str, value: Any) -> SwitchedOff:
    """Make a rule that ``keys`` have no effect unless ``key`` has ``value``."""
    return _off(keys, f"{key} is not {value}", lambda cfg: cfg.value_of(key) != value)


def _others(section: str, of: type[Section], switch: str) -> str:
    """Return the string ``SECTION: KEY KEY ...`` with all keys of a section except ``switch``. ``section`` is
    its dotted name, and ``of`` its class."""
    return f"{section}: {' '.join(name for name in of.model_fields if name != switch)}"


def _resumes(cfg: RunConfig) -> bool:
    return bool(cfg.Engine.save_load.resume) or cfg.Engine.save_load.ckpt_dir is not None


def _loads(cfg: RunConfig) -> bool:
    lora, teacher = cfg.Model.lora, cfg.Compress.Distill
    more = (cfg.Engine.save_load.init_from, None if lora is None else lora.base, teacher)
    return _resumes(cfg) or any(one is not None for one in more)


def _ignores_shuffle(cfg: RunConfig, mode: str) -> bool:
    """Whether the dataset of ``Data.<mode>`` orders its records itself, so that ``sampler.shuffle`` has no
    effect."""
    split = getattr(cfg.Data, mode)
    traits = None if split is None else DATASETS.traits(split.dataset.name)
    return traits is not None and traits.kind != "corpus" and (mode != "Train" or traits.shuffled)


def _knows_documents(split: DataSplitConfig | None) -> bool:
    dataset = DatasetConfig() if split is None else split.dataset
    return dataset.reset_position_ids or dataset.reset_attention_mask or dataset.eod_mask_loss


def _decays(cfg: RunConfig) -> bool:
    return SCHEDULES.traits(cfg.Optimizer.lr.decay_style).decays


_ADAM_KEYS = OptimizerTraits.reads
_PRECISION, _SAVE_LOAD = "Engine.mix_precision", "Engine.save_load"
_GROWTH = "incr_every_n_steps hysteresis"

SWITCHED_OFF = (
    _off(
        f"Optimizer: {' '.join(_ADAM_KEYS)} weight_decay_schedule",
        "Optimizer.name = SGD is plain gradient descent",
        lambda cfg: cfg.Optimizer.names == {"SGD"},
    ),
    *(
        _off(
            f"Optimizer.{key}",
            "Optimizer.name is an optimizer that does not read it",
            lambda cfg, key=key: (
                cfg.Optimizer.names != {"SGD"}
                and all(key not in OPTIMIZERS.traits(name).reads for name in cfg.Optimizer.names)
            ),
        )
        for key in _ADAM_KEYS
    ),
    _off(
        f"Optimizer.muon: {' '.join(MuonConfig.model_fields)}",
        "no optimizer is Muon",
        lambda cfg: "Muon" not in cfg.Optimizer.names,
    ),
    _off(
        "Optimizer.weight_decay",
        "Optimizer.weight_decay_schedule replaces it",
        lambda cfg: cfg.Optimizer.name != "SGD" and cfg.Optimizer.weight_decay_schedule is not None,
    ),
    _off(
        "Optimizer.lr.min_lr",
        "Optimizer.lr.decay_style = constant stays at max_lr",
        lambda cfg: not _decays(cfg),
    ),
    _off(
        "Optimizer.lr.decay_steps",
        "Optimizer.lr.decay_style = constant does not decay",
        lambda cfg: not _decays(cfg) and not cfg.Optimizer.lr.warmup_rate,
    ),
    _off_unless("Optimizer.lr.wsd_decay_style", "Optimizer.lr.decay_style", "wsd"),
    *(
        _off_unless(
            f"Generation: {' '.join(key for key in keys if key != 'temperature')}",
            "Generation.decode_strategy",
            strategy,
        )
        for strategy, keys in READ_BY.items()
    ),
    _off(
        "Generation.temperature",
        "Generation.decode_strategy is not sampling",
        lambda cfg: not cfg.Generation.reads_temperature,
    ),
    _off(
        "Generation.prompt_lookup_num_tokens",
        "tokens are guessed in greedy search with a cache and without an assistant only",
        lambda cfg: (
            cfg.Generation.decode_strategy != "greedy_search"
            or not cfg.Generation.use_cache
            or cfg.Generation.assistant_model is not None
        ),
    ),
    _off_while("Generation.num_assistant_tokens", "Generation.assistant_model", None),
    _off(
        "Generation.diversity_rate",
        "Generation.num_beam_groups is 1",
        lambda cfg: cfg.Generation.decode_strategy == "beam_search" and cfg.Generation.num_beam_groups == 1,
    ),
    _off(
        "Model.fused_linear",
        "on a GPU Paddle always adds the bias within the matrix product, on a CPU never",
        lambda cfg: True,
    ),
    _off(
        "Model.fuse_attn_qkv",
        "the projections are always one weight, with the same results",
        lambda cfg: True,
    ),
    _off_while("Model: attn_post_norm_scale ffn_post_norm_scale", "Model.sandwich_norm", False),
    _off_while(
        "Model: recompute_granularity recompute_layers no_recompute_layers recompute_interval",
        "Model.use_recompute",
        False,
    ),
    _off_while(
        f"Engine.num_train_epochs {_SAVE_LOAD}.save_epoch", "Engine.run_mode", "step", ", which counts steps"
    ),
    _off(
        f"{_SAVE_LOAD}.save_steps",
        "Engine.run_mode = epoch saves by Engine.save_load.save_epoch",
        lambda cfg: cfg.Engine.run_mode == "epoch" and cfg.Engine.save_load.save_epoch is not None,
    ),
    _off(
        "Model.num_classes",
        "only GPTFinetuneModule has classes",
        lambda cfg: not cfg.Model.task.classifies,
    ),
    _off(
        "Engine.eval_iters",
        "the data set of Data.Eval is read to its end in each evaluation",
        lambda cfg: cfg.Data.Eval is not None and not cfg.Data.Eval.dataset.is_corpus,
    ),
    _off(
        "Data.Test",
        "only ppfleetx eval with GPTFinetuneModule reads the test set (ppfleetx index prepares it)",
        lambda cfg: not cfg.Model.task.classifies,
    ),
    _off(
        "Offline_Eval",
        "Model.module is not GPTEvalModule; ppfleetx eval evaluates on Data.Eval",
        lambda cfg: not cfg.Model.task.offline_evaluation,
    ),
    _off_while("Offline_Eval: overlapping_eval detokenizer", "Offline_Eval.cloze_eval", True),
    _off_while("Offline_Eval.cloze_strict", "Offline_Eval.cloze_eval", False),
    _off_while(
        "Distributed.sharding: sharding_stage broadcast_overlap", "Distributed.sharding.sharding_degree", 1
    ),
    _off(
        "Distributed: sharding.reduce_overlap bucket_size",
        "dp_degree, sharding_degree and sep_degree are 1: there are no gradients to sum",
        lambda cfg: cfg.plan.data_size == cfg.plan.sep == 1,
    ),
    _off(
        "Distributed.bucket_size",
        "Distributed.sharding.reduce_overlap is False, so messages of gradients have 64 MiB",
        lambda cfg: (
            cfg.plan.data_size * cfg.plan.sep > cfg.plan.sharding == 1
            and not cfg.Distributed.sharding.reduce_overlap
        ),
    ),
    _off(
        "Distributed: pp_layers noop_layers",
        "Distributed.pp_degree is 1",
        lambda cfg: cfg.Distributed.pp_degree == cfg.Model.virtual_pp_degree == 1,
    ),
    _off_while(_others(_PRECISION, MixedPrecisionConfig, "enable"), "Engine.mix_precision.enable", False),
    _off_while(
        "Model: softmax_in_fp32 scale_qk_by_layer_num",
        "Engine.mix_precision.enable",
        False,
        ": the run computes in float32",
    ),
    _off_while(
        f"{_PRECISION}: scale_loss use_dynamic_loss_scaling {_GROWTH}",
        "Engine.mix_precision.dtype",
        "bfloat16",
        ", which needs no loss scale",
    ),
    _off_while(f"{_PRECISION}: {_GROWTH}", "Engine.mix_precision.use_dynamic_loss_scaling", False),
    _off_while(
        f"{_PRECISION}.main_grad_fp32",
        "Engine.mix_precision.level",
        "O1",
        ", which keeps weights and gradients in float32",
    ),
    _off(
        f"{_SAVE_LOAD}: load_optim load_rng reset_data lr_schedule",
        "no run is resumed: neither Engine.save_load.resume nor ckpt_dir is set",
        lambda cfg: not _resumes(cfg),
    ),
    _off(
        f"{_SAVE_LOAD}: allow_missing allow_extra allow_other_shapes verify",
        "no checkpoint is loaded: none of Engine.save_load.resume, ckpt_dir and init_from is set",
        lambda cfg: not _loads(cfg),
    ),
    _off(
        "Engine.on_hang",
        "Engine.hang_timeout and hang_start_timeout are 0",
        lambda cfg: cfg.Engine.hang_timeout == cfg.Engine.hang_start_timeout == 0,
    ),
    _off(
        "Engine.straggler_freq",
        "one process has no others to be compared with",
        lambda cfg: cfg.plan.world_size == 1,
    ),
    _off_while(_others("Engine.spike", SpikeConfig, "action"), "Engine.spike.action", "off"),
    _off_while(
        "Engine.spike.max_in_a_row", "Engine.spike.action", "stop", ", which ends the run at the first spike"
    ),
    _off(
        "Engine: eval_freq eval_iters",
        "Data.Eval is null: there is nothing to evaluate on",
        lambda cfg: cfg.Data.Eval is None and cfg.Engine.eval_freq != 0,
    ),
    _off_while("Engine.eval_iters", "Data.Eval", None, ": there is nothing to evaluate on"),
    _off_while("Engine.test_iters", "Data.Test", None),
    _off_while(_others("Profiler", ProfilerConfig, "enable"), "Profiler.enable", False),
    _off(
        "Model: rotary_base rotary_percent",
        "Model.position_embedding_type is not rope",
        lambda cfg: not cfg.Model.positions.rotates,
    ),
    _off_while("Model.moe.aux_loss.weight", "Model.moe.aux_loss.kind", "none"),
    _off_while("Model.moe.router.group_score", "Model.moe.router.num_groups", None),
    _off(
        "Model.add_bias_linear",
        "Model.add_qkv_bias, add_out_proj_bias and add_mlp_bias override it for all linears",
        lambda cfg: None not in (cfg.Model.add_qkv_bias, cfg.Model.add_out_proj_bias, cfg.Model.add_mlp_bias),
    ),
    _off(
        "Data.Train.sampler.drop_last",
        "after the last sample training goes on with the first",
        lambda cfg: cfg.Data.Train is not None,
    ),
    *(
        _off(
            f"Data.{mode}.sampler: {keys}",
            f"Data.{mode}.dataset.name reads records of a file: {why}",
            lambda cfg, mode=mode: _ignores_shuffle(cfg, mode),
        )
        for mode, keys, why in (
            ("Train", "shuffle", "each pass has a new order"),
            ("Eval", "shuffle drop_last", "all of them, in their order"),
        )
    ),
    *(
        _off(
            f"Data.{mode}.dataset.eod_id",
            "none of reset_position_ids, reset_attention_mask and eod_mask_loss uses it",
            lambda cfg, mode=mode: not _knows_documents(getattr(cfg.Data, mode)),
        )
        for mode in ("Train", "Eval")
    ),
    _off_while(
        _others("Compress.Quantization", QuantizationConfig, "enable"), "Compress.Quantization.enable", False
    ),
    _off_while(
        "Compress.Quantization.moving_rate",
        "Compress.Quantization.activation_quantize_type",
        "abs_max",
        ", which keeps no average",
    ),
    _off_while(_others("Compress.Prune", PruneConfig, "enable"), "Compress.Prune.enable", False),
    _off_while("Global.allow_tf32", "Global.device", "cpu", ", which has no TF32"),
)


def _is_written(cfg: RunConfig, key: str, origins: dict[str, str]) -> bool:
    """Whether the user set ``key`` or, for a section, any key in it."""
    places = [place for name, place in origins.items() if name == key or name.startswith(f"{key}.")]
    value = cfg.value_of(key)
    if value is None:
        return False
    if any(map(is_argument, places)):
        return True
    # The config.yaml that a run writes has every key, so a default in a file does not count.
    return value != _default(cfg, key) and not all(_is_preset(place) for place in places)


def _is_preset(place: str) -> bool:
    """Whether a value comes from a shipped configuration, a checkpoint, a run or a model, and not from the
    user. ``place`` is where the value was written, such as ``file:line``."""
    if is_of_a_model(place):
        return True
    file = Path(place.rpartition(":")[0])
    if file.resolve().is_relative_to(CONFIGS) or (file.parent / _MANIFEST).is_file():
        return True
    return file.name == "config.yaml" and is_record(file)  # a copy is a configuration of the user


def _default(cfg: RunConfig, key: str) -> Any:
    section, _, name = key.rpartition(".")
    parent = cfg.value_of(section) if section else cfg
    return type(parent).model_fields[name].get_default(call_default_factory=True)


def missing(cfg: RunConfig) -> list[str]:
    """Return a list with one message if the run needs ``Data.tokenizer`` but it is not set; otherwise an
    empty list. Datasets that read text files need the tokenizer."""
    splits = {name: getattr(cfg.Data, name) for name in MODES}
    texts = [name for name, split in splits.items() if split is not None and split.dataset.is_texts]
    if not texts or cfg.Data.tokenizer is not None:
        return []
    return [f"Data.tokenizer: the texts of Data.{texts[0]} need one (-o Data.tokenizer.dir=DIR)"]


def absent_loggers(cfg: RunConfig) -> dict[str, str]:
    """Return {name: advice} for each configured logger whose library is not installed.

    The advice says what to install. No library is imported.
    """
    found = {}
    for item in cfg.Engine.loggers:
        traits = LOGGERS.traits(item.name)
        if traits.package is not None and importlib.util.find_spec(traits.package) is None:
            found[item.name] = f"`pip install 'ppfleetx[{traits.extra}]'`, which brings {traits.package}"
    return found


def refuse_absent(cfg: RunConfig) -> None:
    """Raise ConfigError if the library of a configured logger is missing. The message says what to
    install."""
    for name, wanted in absent_loggers(cfg).items():
        place = cfg.origins.get("Engine.loggers")
        raise ConfigError(f"needs {wanted}", key="Engine.loggers", value=name, place=place)
