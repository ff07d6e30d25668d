"""Options that the user has set but that have no effect because another key switches them off."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Any

from ppfleetx.config.fields import Section
from ppfleetx.config.reading.parse import is_of_a_model
from ppfleetx.config.reading.tree import is_argument
from ppfleetx.config.registries import DATASETS, OPTIMIZERS, SCHEDULES
from ppfleetx.config.sections.compress import PruneConfig, QuantizationConfig
from ppfleetx.config.sections.data import DatasetConfig, DataSplitConfig
from ppfleetx.config.sections.engine import MixedPrecisionConfig, ProfilerConfig, SpikeConfig
from ppfleetx.config.sections.generation import READ_BY
from ppfleetx.config.sections.root import RunConfig

_SHIPPED = Path(__file__).resolve().parents[1] / "configs"
_MANIFEST = "manifest.json"  # a configuration beside it is part of a checkpoint


def without_effect(cfg: RunConfig) -> list[str]:
    """Explain, in one sentence each, the options that change nothing in this run.

    Keys are named only if the user set them, in a file or with -o, and not if a shipped file or the
    configuration of a checkpoint did.
    """
    reasons, origins = [], cfg.origins
    for rule in SWITCHED_OFF:
        keys = [key for key in rule.keys if _is_written(cfg, key, origins)] if rule.applies(cfg) else []
        if keys:
            verb = "has" if len(keys) == 1 else "have"
            reasons.append(f"{', '.join(keys)} {verb} no effect: {rule.why}")
    return reasons


@dataclass(frozen=True)
class SwitchedOff:
    """A rule: if ``applies`` is true for a configuration, ``keys`` have no effect in it. ``why`` is the
    reason."""

    keys: tuple[str, ...]
    applies: Callable[[RunConfig], bool]
    why: str


def _keys(section: str, names: str) -> tuple[str, ...]:
    return tuple(f"{section}.{name}" for name in names.split())


def _others(section: str, of: type[Section], switch: str) -> tuple[str, ...]:
    """All keys of a section except its switch. A nested section stands for all its keys."""
    return tuple(f"{section}.{name}" for name in of.model_fields if name != switch)


_PRECISION, _SAVE_LOAD = "Engine.mix_precision", "Engine.save_load"
_LOSS_SCALE = _keys(_PRECISION, "scale_loss use_dynamic_loss_scaling incr_every_n_steps hysteresis")


def _computes_in(cfg: RunConfig, dtype: str) -> bool:
    precision = cfg.Engine.mix_precision
    return precision.enable and precision.dtype == dtype


def _resumes(cfg: RunConfig) -> bool:
    return bool(cfg.Engine.save_load.resume) or cfg.Engine.save_load.ckpt_dir is not None


def _loads(cfg: RunConfig) -> bool:
    lora, teacher = cfg.Model.lora, cfg.Compress.Distill
    more = (cfg.Engine.save_load.init_from, None if lora is None else lora.base, teacher)
    return _resumes(cfg) or any(one is not None for one in more)


def _reads_records(cfg: RunConfig, mode: str) -> bool:
    """Whether a split consists of records of a file and, for ``Train``, each pass has a new order."""
    split = getattr(cfg.Data, mode)
    traits = None if split is None else DATASETS.traits(split.dataset.name)
    return traits is not None and traits.kind != "corpus" and (mode != "Train" or traits.shuffled)


def _knows_documents(split: DataSplitConfig | None) -> bool:
    dataset = DatasetConfig() if split is None else split.dataset
    return dataset.reset_position_ids or dataset.reset_attention_mask or dataset.eod_mask_loss


def _has_one_chunk(cfg: RunConfig) -> bool:
    return cfg.Distributed.pp_degree == cfg.Model.virtual_pp_degree == 1


SWITCHED_OFF = (
    SwitchedOff(
        _keys("Optimizer", "beta1 beta2 epsilon weight_decay weight_decay_schedule"),
        lambda cfg: cfg.Optimizer.names == {"SGD"},
        "Optimizer.name = SGD is plain gradient descent",
    ),
    *(
        SwitchedOff(
            (f"Optimizer.{key}",),
            lambda cfg, key=key: (
                cfg.Optimizer.names != {"SGD"}
                and all(key not in OPTIMIZERS.traits(name).reads for name in cfg.Optimizer.names)
            ),
            "Optimizer.name is an optimizer that does not read it",
        )
        for key in ("beta1", "beta2", "epsilon", "weight_decay")
    ),
    SwitchedOff(
        _keys("Optimizer.muon", "momentum nesterov scale steps coefficients split epsilon"),
        lambda cfg: "Muon" not in cfg.Optimizer.names,
        "no optimizer is Muon",
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
        lambda cfg: (
            cfg.Generation.decode_strategy != "greedy_search"
            or not cfg.Generation.use_cache
            or cfg.Generation.assistant_model is not None
        ),
        "tokens are guessed in greedy search with a cache and without an assistant only",
    ),
    SwitchedOff(
        ("Generation.num_assistant_tokens",),
        lambda cfg: cfg.Generation.assistant_model is None,
        "Generation.assistant_model is null",
    ),
    SwitchedOff(
        ("Generation.diversity_rate",),
        lambda cfg: cfg.Generation.decode_strategy == "beam_search" and cfg.Generation.num_beam_groups == 1,
        "Generation.num_beam_groups is 1",
    ),
    SwitchedOff(
        ("Model.fused_linear",),
        lambda cfg: True,
        "on a GPU Paddle always adds the bias within the matrix product, on a CPU never",
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
        "only ppfleetx eval with GPTFinetuneModule reads the test set (ppfleetx index prepares it)",
    ),
    SwitchedOff(
        ("Offline_Eval",),
        lambda cfg: not cfg.Model.task.offline_evaluation,
        "Model.module is not GPTEvalModule; ppfleetx eval evaluates on Data.Eval",
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
    SwitchedOff(
        ("Optimizer.lr.decay_steps",),
        lambda cfg: (
            not SCHEDULES.traits(cfg.Optimizer.lr.decay_style).decays and not cfg.Optimizer.lr.warmup_rate
        ),
        "Optimizer.lr.decay_style = constant does not decay",
    ),
    SwitchedOff(
        _keys("Distributed.sharding", "sharding_stage broadcast_overlap"),
        lambda cfg: cfg.Distributed.sharding.sharding_degree == 1,
        "Distributed.sharding.sharding_degree is 1",
    ),
    SwitchedOff(
        _keys("Distributed", "sharding.reduce_overlap bucket_size"),
        lambda cfg: cfg.plan.data_size == cfg.plan.sep == 1,
        "dp_degree, sharding_degree and sep_degree are 1: there are no gradients to sum",
    ),
    SwitchedOff(
        _keys("Distributed", "pp_layers noop_layers"),
        _has_one_chunk,
        "Distributed.pp_degree is 1",
    ),
    SwitchedOff(
        _others(_PRECISION, MixedPrecisionConfig, "enable"),
        lambda cfg: not cfg.Engine.mix_precision.enable,
        "Engine.mix_precision.enable is False",
    ),
    SwitchedOff(
        _keys("Model", "softmax_in_fp32 scale_qk_by_layer_num"),
        lambda cfg: not cfg.Engine.mix_precision.enable,
        "Engine.mix_precision.enable is False: the run computes in float32",
    ),
    SwitchedOff(
        _LOSS_SCALE,
        lambda cfg: _computes_in(cfg, "bfloat16"),
        "Engine.mix_precision.dtype = bfloat16 needs no loss scale",
    ),
    SwitchedOff(
        _LOSS_SCALE[2:],
        lambda cfg: _computes_in(cfg, "float16") and not cfg.Engine.mix_precision.use_dynamic_loss_scaling,
        "Engine.mix_precision.use_dynamic_loss_scaling is False",
    ),
    SwitchedOff(
        (f"{_PRECISION}.main_grad_fp32",),
        lambda cfg: cfg.Engine.mix_precision.enable and cfg.Engine.mix_precision.level == "O1",
        "Engine.mix_precision.level = O1 keeps weights and gradients in float32",
    ),
    SwitchedOff(
        _keys(_SAVE_LOAD, "load_optim load_rng reset_data lr_schedule"),
        lambda cfg: not _resumes(cfg),
        "no run is resumed: neither Engine.save_load.resume nor ckpt_dir is set",
    ),
    SwitchedOff(
        _keys(_SAVE_LOAD, "allow_missing allow_extra allow_other_shapes verify"),
        lambda cfg: not _loads(cfg),
        "no checkpoint is loaded: none of Engine.save_load.resume, ckpt_dir and init_from is set",
    ),
    SwitchedOff(
        ("Engine.on_hang",),
        lambda cfg: cfg.Engine.hang_timeout == cfg.Engine.hang_start_timeout == 0,
        "Engine.hang_timeout and hang_start_timeout are 0",
    ),
    SwitchedOff(
        ("Engine.straggler_freq",),
        lambda cfg: cfg.plan.world_size == 1,
        "one process has no others to be compared with",
    ),
    SwitchedOff(
        _others("Engine.spike", SpikeConfig, "action"),
        lambda cfg: cfg.Engine.spike.action == "off",
        "Engine.spike.action is off",
    ),
    SwitchedOff(
        ("Engine.spike.max_in_a_row",),
        lambda cfg: cfg.Engine.spike.action == "stop",
        "Engine.spike.action = stop ends the run at the first spike",
    ),
    SwitchedOff(
        _keys("Engine", "eval_freq eval_iters"),
        lambda cfg: cfg.Data.Eval is None,
        "there is no Data.Eval to evaluate on",
    ),
    SwitchedOff(("Engine.test_iters",), lambda cfg: cfg.Data.Test is None, "there is no Data.Test"),
    SwitchedOff(
        _others("Profiler", ProfilerConfig, "enable"),
        lambda cfg: not cfg.Profiler.enable,
        "Profiler.enable is False",
    ),
    SwitchedOff(
        _keys("Model", "rotary_base rotary_percent"),
        lambda cfg: not cfg.Model.positions.rotates,
        "Model.position_embedding_type is not rope",
    ),
    SwitchedOff(
        ("Model.moe.aux_loss.weight",),
        lambda cfg: cfg.Model.moe is not None and cfg.Model.moe.aux_loss.kind == "none",
        "Model.moe.aux_loss.kind is none",
    ),
    SwitchedOff(
        ("Model.moe.router.group_score",),
        lambda cfg: cfg.Model.moe is not None and cfg.Model.moe.router.num_groups is None,
        "Model.moe.router.num_groups is null",
    ),
    SwitchedOff(
        ("Model.add_bias_linear",),
        lambda cfg: None not in (cfg.Model.add_qkv_bias, cfg.Model.add_out_proj_bias, cfg.Model.add_mlp_bias),
        "Model.add_qkv_bias, add_out_proj_bias and add_mlp_bias say it for each linear",
    ),
    SwitchedOff(
        ("Data.Train.sampler.drop_last",),
        lambda cfg: cfg.Data.Train is not None,
        "after the last sample training goes on with the first",
    ),
    *(
        SwitchedOff(
            _keys(f"Data.{mode}.sampler", keys),
            lambda cfg, mode=mode: _reads_records(cfg, mode),
            f"Data.{mode}.dataset.name reads records of a file: {why}",
        )
        for mode, keys, why in (
            ("Train", "shuffle", "each pass has a new order"),
            ("Eval", "shuffle drop_last", "all of them, in their order"),
        )
    ),
    *(
        SwitchedOff(
            (f"Data.{mode}.dataset.eod_id",),
            lambda cfg, mode=mode: not _knows_documents(getattr(cfg.Data, mode)),
            "none of reset_position_ids, reset_attention_mask and eod_mask_loss asks for it",
        )
        for mode in ("Train", "Eval")
    ),
    SwitchedOff(
        _others("Compress.Quantization", QuantizationConfig, "enable"),
        lambda cfg: cfg.Compress.Quantization is not None and not cfg.Compress.Quantization.enable,
        "Compress.Quantization.enable is False",
    ),
    SwitchedOff(
        ("Compress.Quantization.moving_rate",),
        lambda cfg: (
            cfg.Compress.quantization is not None
            and cfg.Compress.quantization.activation_quantize_type == "abs_max"
        ),
        "Compress.Quantization.activation_quantize_type = abs_max keeps no average",
    ),
    SwitchedOff(
        _others("Compress.Prune", PruneConfig, "enable"),
        lambda cfg: cfg.Compress.Prune is not None and not cfg.Compress.Prune.enable,
        "Compress.Prune.enable is False",
    ),
    SwitchedOff(
        ("Global.allow_tf32",),
        lambda cfg: cfg.Global.device == "cpu",
        "Global.device = cpu has no TF32",
    ),
)


def _is_written(cfg: RunConfig, key: str, origins: dict[str, str]) -> bool:
    """Whether the user set ``key`` or, for a section, any key in it.

    A default value in a file does not count, because the ``config.yaml`` of a run holds every key.
    """
    places = [place for name, place in origins.items() if name == key or name.startswith(f"{key}.")]
    value = _value(cfg, key)
    if value is None:
        return False
    if any(map(is_argument, places)):
        return True
    return value != _default(cfg, key) and not all(_is_given(place) for place in places)


def _is_given(place: str) -> bool:
    """Whether a place is in a shipped file or in a model's directory."""
    if is_of_a_model(place):
        return True
    file = Path(place.rpartition(":")[0])
    return file.resolve().is_relative_to(_SHIPPED) or (file.parent / _MANIFEST).is_file()


def _value(cfg: RunConfig, key: str) -> Any:
    """The value of ``key``; None below a null section."""
    return reduce(lambda node, name: None if node is None else getattr(node, name), key.split("."), cfg)


def _default(cfg: RunConfig, key: str) -> Any:
    section, _, name = key.rpartition(".")
    parent = _value(cfg, section) if section else cfg
    return type(parent).model_fields[name].get_default(call_default_factory=True)
