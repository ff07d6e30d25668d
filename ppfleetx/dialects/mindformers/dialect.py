"""Translation of MindFormers: the command line of ``run_mindformer.py`` and its YAML files. The rules
translate keys that depend on each other."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass

from ppfleetx.config.errors import ConfigError
from ppfleetx.dialects.key_tables import KeyTable, read_file, tables_of
from ppfleetx.dialects.mindformers.command_line import FLAGS, RUN_MODES, read_command_line
from ppfleetx.dialects.registry import Dialect
from ppfleetx.dialects.translation import Translation, translate
from ppfleetx.dialects.user_options import given_in, without_launcher
from ppfleetx.utils.device_support import CPU, GPU, NPU, device_for_recipe, expected_device

_MODEL = "model.model_config"
_DEVICES = {"Ascend": NPU, "GPU": GPU, "CPU": CPU}
_TYPES = ("float32", "float16", "bfloat16")
_DECIDING = ("num_experts_chosen", "aux_loss_factor", "capacity_factor", "norm_topk_prob")
_EXPERTS = frozenset(
    f"moe_config.{name}"
    for name in (
        *_DECIDING, "expert_num", "routing_policy", "expert_group_size", "group_wise_a2a",
        "comp_comm_parallel", "comp_comm_parallel_degree",
    )
)  # fmt: skip
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*GB", re.ASCII)


def run_mode(run: Translation) -> str:
    return run.choice("run_mode", RUN_MODES, "train")


def device(run: Translation) -> None:
    """Translate the options for the device, its memory limit, and the data types of computation, softmax and
    weights. The default of ``compute_dtype`` is float16, as in MindFormers."""
    target = run.choice("context.device_target", _DEVICES, "Ascend")
    chosen, why = device_for_recipe(NPU) if target == "Ascend" else (_DEVICES[target], "")
    run.put("Global.device", chosen, "context.device_target", why=why)
    on_cpu = chosen == CPU or (chosen == "auto" and expected_device("auto") == CPU)
    _memory_limit(run, has_limit=not on_cpu and chosen != NPU)
    _precision(run, on_cpu)


def _memory_limit(run: Translation, *, has_limit: bool) -> None:
    key = "context.max_device_memory"
    text = run.text(key)
    if text is None:
        return
    size = _SIZE.fullmatch(text.strip())
    if size is None:
        raise run.error(key, 'must be a size like "31GB"')
    if not has_limit:
        run.unused.append(run.given[key])
        return
    megabytes = int(float(size[1]) * 1024)
    run.put("Global.flags.FLAGS_gpu_memory_limit_mb", megabytes, key)


def _precision(run: Translation, on_cpu: bool) -> None:
    compute_key, weights_key = f"{_MODEL}.compute_dtype", f"{_MODEL}.param_init_type"
    compute = run.choice(compute_key, _TYPES, "float16")  # the default of GPT2Config
    weights = run.choice(weights_key, _TYPES, "float32")
    softmax_key = run.first(f"{_MODEL}.softmax_compute_type", f"{_MODEL}.softmax_dtype")
    softmax = run.choice(softmax_key, _TYPES, "float32")
    run.put("Model.softmax_in_fp32", softmax == "float32", softmax_key)
    if compute == "float32":
        if weights != "float32":
            raise run.conflict(
                (weights_key, compute_key), "weights in 16 bits need a compute_dtype of 16 bits"
            )
        run.put("Engine.mix_precision.enable", False, compute_key)
        return
    run.put_precision(compute, compute_key, on_cpu=on_cpu)
    run.put("Engine.mix_precision.level", "O2", weights_key, why="float32 masters")
    run.put("Engine.mix_precision.hysteresis", 1, why="DynamicLossScaleUpdateCell halves at each overflow")


def experts(run: Translation) -> None:
    """Translate MindFormers' ``moe_config``. If it has more than one expert, every layer becomes a mixture of
    experts."""
    number = run.integer("moe_config.expert_num", 1, least=1)
    parallel = "parallel_config.expert_parallel"
    degree = run.integer(parallel, 1, least=1)
    if number == 1:
        if degree > 1:
            raise run.error(parallel, "must be 1: moe_config.expert_num is 1, and there are no experts")
        of_experts = (name for name in run.given if name.startswith("moe_config."))
        run.unused.extend(run.given[name] for name in of_experts)
        return
    if other := [name for name in run.given if name.startswith("moe_config.") and name not in _EXPERTS]:
        raise run.error(other[0], "is not supported")
    chosen, weight, factor, normalize = (f"moe_config.{name}" for name in _DECIDING)
    top_k = run.integer(chosen, 1, least=1)
    for key, value, name in (
        ("num_experts", number, "moe_config.expert_num"),
        ("top_k", top_k, chosen),
        ("router.normalize", top_k > 1 and run.flag(normalize, True), normalize),
        ("aux_loss.kind", "switch", weight),
        ("aux_loss.weight", run.number(weight, 0.05, least=0), weight),
        ("capacity.factor", run.number(factor, 1.1, least=0), factor),
        ("capacity.policy", "position", factor),
    ):
        run.put(f"Model.moe.{key}", value, name)
    if degree > 1:
        run.put("Distributed.ep_degree", degree, parallel)
    run.notes.append(
        "the balancing loss takes the experts' shares from the step before, and capacity is counted in each "
        "sequence, so that neither depends on plan and micro batches, as both do there"
    )


def degrees(run: Translation) -> None:
    """Translate the parallel degrees in MindFormers' ``parallel_config``. They have no effect if
    ``use_parallel`` is False or ``parallel_mode`` is 0."""
    use = run.flag("use_parallel", False)
    mode = run.choice("parallel.parallel_mode", (0, 1, 2, 3), 0)
    data, model, stages = (
        run.integer(f"parallel_config.{name}", 1, least=1)
        for name in ("data_parallel", "model_parallel", "pipeline_stage")
    )
    is_cut = max(data, model, stages) > 1
    if not use:
        run.put("Distributed.dp_degree", 1, "use_parallel", why="one process")
        if is_cut:
            run.notes.append("use_parallel is False: one process, and parallel_config is not used")
        return
    if mode > 1:
        raise run.error(
            "parallel.parallel_mode",
            "is not supported; give 1 with the degrees in parallel_config, or 0",
        )
    if mode == 0:
        if _divides_optimizer(run):
            raise run.conflict(
                ("parallel_config.optimizer_shard", "parallel.enable_parallel_optimizer"),
                "with parallel_mode 0 nothing says over how many ranks; give parallel_mode 1, data_parallel",
            )
        if is_cut:
            run.notes.append(
                "parallel_mode is 0: all processes are data-parallel, parallel_config is not used"
            )
        return
    if run_mode(run) == "predict":
        _degrees_for_generation(run, data, model, stages)
        return
    _data_axis(run, data)
    run.put("Distributed.mp_degree", model, "parallel_config.model_parallel")
    run.put("Distributed.pp_degree", stages, "parallel_config.pipeline_stage")
    _uneven_stages(run, stages)
    if run.flag("parallel_config.use_seq_parallel", False) and model > 1:
        run.put("Model.sequence_parallel", True, "parallel_config.use_seq_parallel")


def _divides_optimizer(run: Translation) -> bool:
    shard = run.flag("parallel_config.optimizer_shard")
    parallel = run.flag("parallel.enable_parallel_optimizer")
    if shard is None:
        return bool(parallel)
    if parallel is not None and parallel != shard:
        run.notes.append(
            f"optimizer_shard {shard} overrides enable_parallel_optimizer {parallel}, as in MindFormers"
        )
    return shard


def _data_axis(run: Translation, data: int) -> None:
    origins = run.origins(
        "parallel_config.data_parallel",
        "parallel_config.optimizer_shard",
        "parallel.enable_parallel_optimizer",
    )
    key = "recompute_config.parallel_optimizer_comm_recompute"
    again = run.flag(key, False)
    if not _divides_optimizer(run):
        run.put("Distributed.dp_degree", data, "parallel_config.data_parallel")
        return
    why = "ranks that share the optimizer's states; they divide the batch as well"
    run.put("Distributed.dp_degree", 1, *origins)
    run.put("Distributed.sharding.sharding_degree", data, *origins, why=why)
    run.put("Distributed.sharding.sharding_stage", 3 if again else 1, key)


def _degrees_for_generation(run: Translation, data: int, model: int, stages: int) -> None:
    """Translate the parallel degrees for generation, where pipeline stages become data-parallel replicas."""
    names = [f"parallel_config.{name}" for name in ("data_parallel", "pipeline_stage")]
    run.put("Distributed.dp_degree", data * stages, *names, why="replicas take prompts in turn")
    run.put("Distributed.mp_degree", model, "parallel_config.model_parallel")
    if stages > 1:
        run.notes.append(
            f"predict: the {stages} pipeline stages become replicas that take turns with prompts"
        )


def _uneven_stages(run: Translation, stages: int) -> None:
    layers = run.integer("model.model_config.num_layers", least=1)
    if layers is None or layers % stages == 0:
        return
    per_stage = max((layers + 1) // stages, 1)  # MindFormers counts the head as one layer
    counts = [0] * stages
    for layer in range(layers):
        counts[min(layer // per_stage, stages - 1)] += 1
    origins = run.origins("parallel_config.pipeline_stage", "model.model_config.num_layers")
    run.put("Distributed.pp_layers", counts, *origins)


def batch(run: Translation) -> None:
    """Translate the micro batch size and the number of micro batches. Without pipeline stages, a step has one
    micro batch, as in MindFormers."""
    size = run.integer("runner_config.batch_size", 1, least=1)
    parts = run.integer("parallel_config.micro_batch_num", 1, least=1)
    in_stages = (
        run.flag("use_parallel", False)
        and run.value("parallel.parallel_mode", 0) == 1
        and run.integer("parallel_config.pipeline_stage", 1, least=1) > 1
    )
    names = ("runner_config.batch_size", "parallel_config.micro_batch_num")
    run.put("Global.micro_batch_size", size, names[0])
    if in_stages:
        run.put("Global.local_batch_size", size * parts, *names, why="batch_size x micro_batch_num")
        return
    run.put("Global.local_batch_size", size, names[0])
    if parts > 1:
        run.notes.append(
            f"micro_batch_num {parts} ({run.given[names[1]].place}) is not used: without pipeline stages a "
            "step has one micro batch, as in MindFormers"
        )


_TEXT_FILES = (".txt", ".tokens", ".raw", ".text")
_CHECKPOINT_KEYS = ("resume_or_finetune_checkpoint", "load_checkpoint")
_ALWAYS = {
    "Model.initializer_range": (0.01, "linears of MindFormers' GPT-2"),
    "Model.scale_output_init": (False, "MindFormers starts all linears alike"),
    "Model.scale_qk_by_layer_num": (False, "MindFormers does not"),
    "Model.position_embedding_type": ("learned_absolute", "GPT-2"),
    "Model.tie_word_embeddings": (True, "GPT-2"),
    "Model.norm_epsilon": (1e-5, "GPT-2"),
}
_END = 2**31 - 1


def network(run: Translation) -> None:
    """Translate the options for the MLP width and the sequence length. Also set the keys of ppfleetx whose
    value is the same for every GPT-2 of MindFormers, such as learned positions."""
    for key, (value, why) in _ALWAYS.items():
        run.put(key, value, why=why)
    width_key = run.first(f"{_MODEL}.embedding_size", f"{_MODEL}.hidden_size")
    ratio_key = f"{_MODEL}.expand_ratio"
    if width_key in run:
        width = run.integer(width_key, least=1) * run.integer(ratio_key, 4, least=1)
        run.put("Model.ffn_hidden_size", width, width_key, ratio_key, why="width x expand_ratio")
    length_key, positions_key = f"{_MODEL}.seq_length", f"{_MODEL}.max_position_embeddings"
    length = run.integer(length_key, 1024, least=1)
    key = run.first(positions_key, length_key)
    run.put("Model.max_position_embeddings", run.integer(key, length, least=1), key)


def data(run: Translation) -> None:
    """Translate the data options that the run mode uses. For evaluation of a text file and for generation,
    also set ``Model.module``."""
    mode = run_mode(run)
    if mode == "predict":
        run.put("Model.module", "GPTGenerationModule", "run_mode")
    elif mode == "eval":
        _evaluation(run)
    else:
        _corpus(run, "train_dataset", "Train")


def _corpus(run: Translation, block: str, split: str) -> None:
    place = f"Data.{split}.dataset"
    directory_key, length_key = f"{block}.data_loader.dataset_dir", f"{_MODEL}.seq_length"
    if run.value(directory_key) not in (None, ""):
        run.put(f"{place}.input_dir", run.text(directory_key), directory_key)
    shares = [1, 0, 0] if split == "Train" else [0, 1, 0]
    run.put(f"{place}.split", shares, why="the whole corpus")
    run.put(f"{place}.max_seq_len", run.integer(length_key, 1024, least=1), length_key)
    workers = f"{block}.num_parallel_workers"
    run.put(f"Data.{split}.loader.num_workers", run.integer(workers, least=0), workers)


def _evaluation(run: Translation) -> None:
    directory_key, length_key = "eval_dataset.data_loader.dataset_dir", f"{_MODEL}.seq_length"
    file = run.value(directory_key)
    samples_key = "eval_dataset.data_loader.num_samples"
    samples = run.integer(samples_key, -1, least=-1)
    if not (isinstance(file, str) and file.endswith(_TEXT_FILES)):
        _corpus(run, "eval_dataset", "Eval")
        if run.value("eval_dataset.drop_remainder") is False:
            run.notes.append("drop_remainder: of a corpus, the last incomplete global batch is left out")
        if samples > 0:
            batches = math.ceil(samples / run.integer("runner_config.batch_size", 1, least=1))
            run.put("Engine.eval_iters", batches, samples_key, why="whole batches")
        return
    if samples > 0:
        raise run.error(samples_key, "a text file is evaluated whole")
    length = run.integer(length_key, 1024, least=1)
    run.put("Model.module", "GPTEvalModule", "run_mode")
    run.put("Offline_Eval.eval_path", file, directory_key)
    run.put("Offline_Eval.max_seq_len", length, length_key)
    run.put("Offline_Eval.overlapping_eval", length, length_key, why="windows do not overlap")
    size_key = "runner_config.batch_size"
    run.put("Offline_Eval.batch_size", run.integer(size_key, 1, least=1), size_key)


def checkpoint(run: Translation) -> None:
    """Translate the options that name a checkpoint. Depending on the run mode, the run resumes from the
    checkpoint, starts from its weights, or evaluates or generates with it."""
    mode = run_mode(run)
    key, path = _given_checkpoint(run)
    resumes = run.flag("resume_training")
    if mode == "finetune" and path is None:
        raise ConfigError(
            "finetuning needs weights to begin with: give --load_checkpoint DIR",
            key="resume_or_finetune_checkpoint",
            place=run.place,
        )
    if mode in ("eval", "predict") and path is None:
        key = f"{_MODEL}.checkpoint_name_or_path"
        name = run.value(key)  # names of models to download are ignored
        path = name if name and (os.sep in str(name) or os.path.lexists(str(name))) else None
    if path is None:
        return
    begins = mode == "finetune" or (mode == "train" and resumes is False)
    native = "Engine.save_load.init_from" if begins else "Engine.save_load.ckpt_dir"
    run.put(native, path, key, "resume_training")


def _given_checkpoint(run: Translation) -> tuple[str, str | None]:
    for key in _CHECKPOINT_KEYS:
        if run.value(key) not in (None, ""):
            return key, run.text(key)
    return _CHECKPOINT_KEYS[0], None


def length(run: Translation) -> None:
    """Let the run end after its number of epochs, and translate the learning-rate schedule. The key table
    translates the number of epochs."""
    run.put("Engine.run_mode", "epoch", why="runner_config.epochs says how long a run is")
    run.put("Engine.max_steps", _END, why="the epochs end the run")
    run.put("Engine.eval_freq", 0, why="no evaluation during training")
    kind, end_key = run.value("lr_schedule.type", "polynomial"), "lr_schedule.lr_end"
    rate_key = run.first("lr_schedule.learning_rate", "optimizer.learning_rate")
    run.put("Optimizer.lr.max_lr", run.number(rate_key), rate_key)
    ratio_key, steps_key = "lr_schedule.warmup_ratio", "lr_schedule.warmup_steps"
    if ratio_key in run:
        run.put("Optimizer.lr.warmup_rate", run.value(ratio_key), ratio_key)
    else:
        run.put("Optimizer.lr.warmup_steps", run.value(steps_key), steps_key)
    if kind in ("polynomial", "cosine"):
        default = 1e-7 if kind == "polynomial" else 0.0
        run.put("Optimizer.lr.min_lr", run.number(end_key, default, least=0.0), end_key)


def writing(run: Translation) -> None:
    """Translate MindFormers' callbacks for logs and checkpoints, and its options for the steps to profile."""
    for key in [key for key in run.given if key.startswith("callbacks.") and key.endswith(".type")]:
        prefix, kind = key.removesuffix(".type"), run.value(key)
        if kind == "MFLossMonitor":
            name = f"{prefix}.per_print_times"
            run.put("Engine.logging_freq", run.integer(name, 1, least=1), key, name)
        if kind in ("CheckpointMointor", "CheckpointMonitor"):
            _saving(run, key, prefix)
    first, last = "profile_start_step", "profile_stop_step"
    if first in run or last in run:
        steps = [run.integer(first, 1, least=0), run.integer(last, 10, least=1)]
        run.put("Profiler.scheduler", steps, first, last)


def _saving(run: Translation, key: str, prefix: str) -> None:
    steps, keep, background, directory = (
        f"{prefix}.{name}"
        for name in ("save_checkpoint_steps", "keep_checkpoint_max", "async_save", "directory")
    )
    said = run.origins(key)
    run.put("Engine.save_load.save_steps", run.integer(steps, 1, least=1), *said, steps)
    run.put_null("Engine.save_load.save_epoch", *said, why="save_steps counts")
    run.put("Engine.save_load.keep_max", run.integer(keep, 5, least=1), *said, keep)
    if run.flag(background, False):
        run.put("Engine.save_load.async_save", True, background)
    if directory in run:
        run.replace("Engine.save_load.output_dir", run.text(directory), directory)


def generation(run: Translation) -> None:
    """Translate the options for the tokenizer's files, the prompt, and the number of tokens to generate."""
    _new_tokens(run)
    vocabulary, merges, end = (
        f"processor.tokenizer.{name}" for name in ("vocab_file", "merges_file", "eos_token")
    )
    if vocabulary in run or merges in run:
        for name, source in (("vocab_file", vocabulary), ("merges_file", merges), ("eos_token", end)):
            run.put(f"Data.tokenizer.{name}", run.text(source), source)
    if run_mode(run) != "predict":
        return
    prompt = run.text("input_data")
    if prompt is None:
        return
    is_file = os.path.isfile(prompt)  # noqa: PTH113 - Path.is_file raises for names that no file can have
    native = "Generation.prompt_file" if is_file else "Generation.prompt"
    run.put(native, prompt, "input_data")


def _new_tokens(run: Translation) -> None:
    """Translate ``max_decode_length`` to the maximum number of new tokens. In MindFormers, this length
    includes the prompt. A value below the sequence length is used unchanged. Any other value becomes half of
    the sequence length, which leaves the other half for the prompt."""
    key, length_key = f"{_MODEL}.max_decode_length", f"{_MODEL}.seq_length"
    most, positions = run.integer(key, least=1), run.integer(length_key, 1024, least=1)
    if most is None:
        return
    # The limit includes the prompt, whose length is not known yet.
    if most < positions:
        run.put("Generation.max_dec_len", most, key, why="run_mindformer.py counts the prompt")
        return
    why = "half of the positions are the prompt's; run_mindformer.py counts it"
    run.put("Generation.max_dec_len", max(1, positions // 2), key, length_key, why=why)


TABLE = KeyTable([key for keys in tables_of(read_file("mindformers")).values() for key in keys])
_RULES = (
    network,
    device,
    degrees,
    experts,
    batch,
    data,
    checkpoint,
    length,
    writing,
    generation,
)

_BLOCKS = frozenset(
    {"base_config", "context", "parallel", "recompute_config", "parallel_config", "moe_config"}
    | {"runner_config", "runner_wrapper", "lr_schedule", "callbacks", "processor", "trainer"}
    | {"train_dataset", "train_dataset_task", "eval_dataset", "eval_dataset_task"}
)


@dataclass(frozen=True)
class MindFormersRun:
    """The translated command line of ``run_mindformer.py``.

    Attributes:
        translation: the translated configuration.
        mode: the run mode: train, finetune, eval or predict.
        checks: whether to print a report and run nothing (``--check``).
    """

    translation: Translation
    mode: str
    checks: bool


def run_of(argv: Sequence[str]) -> MindFormersRun:
    """Translate the arguments of ``run_mindformer.py`` and the configuration file that they name."""
    line = read_command_line(argv)
    result = translate("MindFormers", str(line.path), given_in(line.tree), TABLE, _RULES)
    result.unused.extend(line.unused)
    return MindFormersRun(result, run_mode(result), line.checks)


DIALECT = Dialect(
    name="mindformers",
    title="MindFormers",
    tables={"the configuration": TABLE, "run_mindformer.py": FLAGS},
    of_file=lambda path, more: run_of(["--config", str(path), *more]).translation,
    of_arguments=lambda argv: run_of(without_launcher(argv)[1]).translation,
    programs=frozenset({"run_mindformer.py"}),
    keys_of_files=_BLOCKS,
    options=frozenset({"config", "run_mode", "device_target", "use_parallel", "dataset_dir", "predict_data"}),
)
