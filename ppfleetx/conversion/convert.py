"""``ppfleetx convert``: convert checkpoints between formats, and check that the logits are the same."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from ppfleetx.checkpoint.lazy_tensors import FLOAT_DTYPES
from ppfleetx.checkpoint.model_only import load_tokenizer, read_ppfleetx, write_ppfleetx
from ppfleetx.checkpoint.reshard import merge, reshard
from ppfleetx.checkpoint.weights import Weights, fitted, network_of
from ppfleetx.config.errors import CheckpointError, ConfigError, DataError, shown
from ppfleetx.config.loader import read_config
from ppfleetx.config.parallel_plan import ParallelPlan
from ppfleetx.config.resume_policy import first_difference, network
from ppfleetx.config.section import Section
from ppfleetx.config.sections.model import ModelConfig
from ppfleetx.config.sections.moe import MoEConfig
from ppfleetx.config.sections.rope import RopeScalingConfig
from ppfleetx.config.validate import section_of
from ppfleetx.conversion.compare_logits import Probe, difference, our_logits, transformers_logits
from ppfleetx.conversion.fleetx import read_fleetx
from ppfleetx.conversion.gguf import QUANTIZED, SUFFIX, extract_tokenizer, is_gguf, read_gguf, write_gguf
from ppfleetx.conversion.huggingface.directory import read_hf, write_hf
from ppfleetx.conversion.huggingface.read_files import read_stored
from ppfleetx.conversion.megatron import read_megatron
from ppfleetx.models.gpt.spec import parameter_specs
from ppfleetx.utils.input_files import os_errors
from ppfleetx.utils.log import get_logger
from ppfleetx.utils.output_files import is_taken, refuse_as_new_file, refuse_unwritable


@dataclass(frozen=True)
class Conversion:
    """The arguments of ``ppfleetx convert``.

    Attributes:
        source, target: the formats of input and output, named as in ``--from`` and ``--to``.
        input, output: the paths of the source and of the result. Each is a directory, or a file for `gguf`.
        model: the `Model` section of the network; None if the source describes the network.
        dtype: the element type of the output, such as `bfloat16`; None: keep the types of the source.
        merge: whether to join the rank files of a ppfleetx checkpoint.
        plan: the parallel plan for which to reshard a ppfleetx checkpoint; None: do not reshard.
        tokenizer: a directory of tokenizer files, which replace the source's tokenizer.
    """

    source: str
    target: str
    input: Path
    output: Path
    model: ModelConfig | None = None
    dtype: str | None = None
    merge: bool = False
    plan: ParallelPlan | None = None
    tokenizer: Path | None = None


@os_errors(CheckpointError)
def convert(job: Conversion) -> Path:
    """Run a conversion. Returns the path of the result.

    Raises CheckpointError if the source cannot be read, a weight is NaN or infinite, the target format does
    not support the network, or arguments contradict each other; ConfigError if an argument is invalid.
    """
    _check(job)
    if job.plan is not None:
        return reshard(job.input, job.output, job.plan)
    if job.merge:
        return merge(job.input, job.output)
    with tempfile.TemporaryDirectory() as scratch:
        weights = read_weights(job)
        if job.source == "gguf" and job.tokenizer is None:
            weights = weights.with_tokenizer(extract_tokenizer(job.input, Path(scratch)))
        return _write(job, weights)


def _write(job: Conversion, weights: Weights) -> Path:
    model = model_of(weights, job.model)
    for note in weights.notes:
        get_logger().warning(f"{job.input}: {note}")
    if job.target != "ppfleetx":
        _refuse_finetuned(job, weights, model)
    tensors = fitted(weights, model)
    if job.target == "ppfleetx":
        return write_ppfleetx(weights, tensors, model, job.output)
    tokenizer = None if weights.tokenizer_dir is None else load_tokenizer(weights.tokenizer_dir)
    if job.target == "hf":
        write_hf(
            tensors,
            model,
            job.output,
            source=weights.source,
            tokenizer_dir=weights.tokenizer_dir,
            token_ids=_token_ids(tokenizer),
        )
        return job.output
    if tokenizer is None:
        raise CheckpointError(
            f"a GGUF file needs a tokenizer, and {weights.place} has none; give --tokenizer DIR"
        )
    dtype = job.dtype if job.dtype in QUANTIZED else None
    write_gguf(tensors, model, job.output, tokenizer=tokenizer, dtype=dtype, source=weights.source)
    return job.output


def read_weights(job: Conversion) -> Weights:
    """Open the input of a conversion. Tensors are read and cast only when they are used."""
    dtype = "float32" if job.dtype in QUANTIZED else job.dtype
    if job.source == "hf":
        if is_gguf(job.input):
            raise CheckpointError(f"{job.input} is a GGUF file: give --from gguf")
        weights = read_hf(job.input)
    elif job.source == "gguf":
        weights = read_gguf(job.input)
    elif job.source == "fleetx":
        weights = read_fleetx(job.input, job.model)
    elif job.source == "megatron":
        weights = read_megatron(job.input, job.model)
    else:
        weights = read_ppfleetx(job.input, masters=dtype == "float32")
    if dtype is not None:
        specs = parameter_specs(model_of(weights, job.model))
        own_types = {name for name, spec in specs.items() if spec.dtype is not None}
        weights = weights.cast(FLOAT_DTYPES[dtype], keep=own_types)
    weights = weights.finite()
    return weights if job.tokenizer is None else weights.with_tokenizer(job.tokenizer)


def model_of(weights: Weights, given: ModelConfig | None) -> ModelConfig:
    """Return the `Model` section of the weights to convert.

    Args:
        weights: the weights, with the keys of the `Model` section that were found in their source.
        given: the user's `Model` section; None: build it from these keys.

    Raises CheckpointError if ``given`` is None and a required key was not found, or if ``given`` contradicts
    a key that was found.
    """
    described = weights.model
    if given is None:
        needed = ("vocab_size", "hidden_size", "num_layers", "num_attention_heads")
        absent = [key for key in needed if key not in described]
        if absent:
            raise CheckpointError(
                f"{weights.place} does not say {', '.join(absent)} of the network; give --config YAML with "
                "its Model section"
            )
        return network_of(described, weights.place)
    for key, value in network(given).items():
        said = described.get(key)
        if key in ("rope_scaling", "moe"):  # null is a value of these keys; it does not mean "not given"
            said = None if said is None else _section(key, said, given)
            differs = key in described and said != value
        else:
            differs = value is not None and said not in (None, value)
        if differs:
            change = first_difference(f"Model.{key}", said, value)
            raise CheckpointError(
                f"--config says {change.key} = {change.now!r}, {weights.place} says {shown(change.then)}"
            )
    return given


def _section(key: str, said: Mapping[str, Any], model: ModelConfig) -> Section:
    if key == "rope_scaling":
        return section_of(RopeScalingConfig, said)
    return section_of(MoEConfig, said).normalized(model.num_layers, model.ffn_size)


def load_model_section(path: str | Path, overrides: tuple[str, ...] = ()) -> ModelConfig:
    """Read the `Model` section of a configuration file; the other sections are not used."""
    return read_config(path, overrides)[0].Model


def check_logits(job: Conversion, written: Path, *, python_with_transformers: str | None = None) -> float:
    """Check a conversion from or to Hugging Face's format by comparing logits. Returns the largest absolute
    difference. Our network's logits must agree before and after the conversion. If transformers is installed
    and can read the Hugging Face directory, its logits must agree too.

    Args:
        job: the conversion.
        written: the path of the result.
        python_with_transformers: the path of a Python interpreter that has `torch` and `transformers`.
            None: use the current interpreter, if it has both.

    Raises CheckpointError if the logits differ too much, if neither format is Hugging Face's, or if the
    result is a GGUF file.
    """
    if "hf" not in (job.source, job.target) or job.target == "gguf":
        raise CheckpointError(
            "--check-logits needs Hugging Face's format on one side, and does not check a GGUF result"
        )
    converted = read_ppfleetx(written) if job.target == "ppfleetx" else read_weights(job)
    model = model_of(converted, job.model)
    probe = Probe.of(model)
    ours = our_logits(converted, model, probe.tokens, probe.positions)
    sides = [(job.input, job.dtype)] if job.source == "hf" else []
    sides += [(job.output, None)] if job.target == "hf" else []
    return max(
        _compare(ours, probe, directory, dtype, python_with_transformers) for directory, dtype in sides
    )


def _compare(ours: np.ndarray, probe: Probe, directory: Path, dtype: str | None, python: str | None) -> float:
    stored = read_hf(directory)
    rounded = stored if dtype is None else stored.cast(FLOAT_DTYPES[dtype])
    largest = difference(ours, probe.logits(rounded), f"of {directory} and of what was converted")
    python = _python_with_transformers(python, directory)
    if python is None:
        return largest
    near = probe.within_float32_angles()
    theirs = transformers_logits(python, directory, near)
    return max(largest, difference(near.logits(stored), theirs, f"of {directory} here and in transformers"))


def _python_with_transformers(given: str | None, directory: Path) -> str | None:
    """Return the path of a Python interpreter that has transformers. None if there is none, or if
    transformers cannot read ``directory``.

    Args:
        given: the interpreter that the user named, if any.

    Raises CheckpointError if the user named an interpreter, but transformers cannot read the directory.
    """
    if read_stored(directory).is_paddle:
        if given is not None:
            raise CheckpointError(
                f"transformers does not read {directory}, which PaddleNLP or PaddleFormers wrote"
            )
        return None
    if given is not None or (find_spec("torch") and find_spec("transformers")):
        return given or sys.executable
    get_logger().info(
        f"transformers is not installed here: {directory} is checked with our own network alone "
        "(--transformers PYTHON names an interpreter that has it)"
    )
    return None


def _check(job: Conversion) -> None:
    same = job.source == job.target == "ppfleetx"
    if (job.merge or job.plan is not None) and not same:
        raise CheckpointError("--merge and --plan go from ppfleetx to ppfleetx")
    if job.merge and job.plan is not None:
        raise CheckpointError("--merge and --plan contradict each other")
    if (job.merge or job.plan is not None) and (job.dtype or job.model or job.tokenizer):
        raise CheckpointError(
            "--merge and --plan change nothing else: they do not allow --dtype, --config, --tokenizer"
        )
    if not job.input.exists():
        raise CheckpointError(f"--input {job.input}: there is no such file or directory")
    if job.input.resolve() == job.output.resolve():
        raise CheckpointError("--output must not be the same directory as --input")
    if job.tokenizer is not None and not job.tokenizer.is_dir():
        raise ConfigError("there is no such directory", key="--tokenizer", value=str(job.tokenizer))
    if job.dtype in QUANTIZED and job.target != "gguf":
        raise ConfigError("only --to gguf can write these weights", key="--dtype", value=job.dtype)
    if job.target == "gguf":
        if job.output.suffix != SUFFIX:
            raise ConfigError(
                f"the file's name has to end in {SUFFIX}", key="--output", value=str(job.output)
            )
        refuse_as_new_file(job.output, "--output")
        return
    if is_taken(job.output):
        raise CheckpointError(f"--output {job.output} exists already; name a new or empty directory")
    refuse_unwritable(job.output, "--output")


def _refuse_finetuned(job: Conversion, weights: Weights, model: ModelConfig) -> None:
    """Raise CheckpointError if the model has LoRA adapters or is a classifier."""
    if model.lora is not None:
        raise CheckpointError(
            f"{weights.place} holds adapters (Model.lora) for frozen weights; make one model of both first: "
            f"ppfleetx merge {job.input} --output DIR"
        )
    if model.task.classifies:
        raise CheckpointError(
            f"{weights.place} is a classifier; only language models are written in Hugging Face's format"
        )


def _token_ids(tokenizer: Any) -> dict[str, Any] | None:
    if tokenizer is None:
        return None
    try:
        ends = list(tokenizer.end_ids)
        return {"bos_token_id": tokenizer.start_id, "eos_token_id": ends[0] if len(ends) == 1 else ends}
    except DataError:
        return None
