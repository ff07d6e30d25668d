"""Implement ``ppfleetx convert``, which converts checkpoints between formats, and ``ppfleetx merge``, which
merges adapters into the weights."""

from __future__ import annotations

from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import Literal

from ppfleetx.commands.options import (
    Command,
    option,
    plugin_option,
    positional,
    positive_int,
    repeated,
    switch,
)
from ppfleetx.config.errors import ConfigError
from ppfleetx.config.parallel_plan import ParallelPlan


@dataclass(frozen=True, kw_only=True)
class Convert(Command):
    """Convert checkpoints from Hugging Face, GGUF, FleetX or Megatron-LM to ppfleetx, Hugging Face or GGUF.

      --from hf        a directory that transformers saved, or a Llama of PaddleNLP or PaddleFormers. The
                       files are safetensors, pytorch_model.bin or model_state.pdparams, sharded or not. The
                       model_type must be listed below
      --from gguf      a GGUF file of llama.cpp with any element type that the library gguf can read.
                       docs/converting.md lists the supported architectures
      --from fleetx    model.pdparams, alone or in rank directories (tensor and pipeline parallel)
      --from megatron  classic mp_rank_XX[_YYY]/model_optim_rng.pt, weights only
      --from ppfleetx  anything Engine.save_load.ckpt_dir accepts

    With --to gguf, --output is a new file. Tensors are converted one at a time. Pickled files are read
    without executing any code in them.

    The model types of --from hf and --to hf:
      gpt2, llama, qwen2, qwen3, mistral, gpt_neox, gemma, gemma2, gemma3_text, granite, minicpm,
      cohere, cohere2, glm, glm4, stablelm, phi3, smollm3, olmo2, olmo3, ernie4_5, seed_oss, internlm2,
      baichuan, gptj, phi, gpt_bigcode, starcoder2, opt, bloom, falcon, mixtral, qwen2_moe, qwen3_moe,
      olmoe, glm4_moe, deepseek_v3, deepseek_v2
    """

    source: Literal["hf", "gguf", "fleetx", "megatron", "ppfleetx"] = option(
        "format of --input", "--from", default=MISSING
    )
    target: Literal["ppfleetx", "hf", "gguf"] = option("format of --output", "--to", default=MISSING)
    input: str = option(
        "what to convert; with --from hf also hf:ORG/NAME or hf:ORG/NAME@REVISION, a model of the "
        "Hugging Face hub",
        default=MISSING,
        metavar="DIR",
    )
    output: str = option("a new or empty directory", default=MISSING, metavar="DIR")
    yaml: str | None = option(
        "configuration whose Model section describes the network, where the source does not (always "
        "with --from fleetx)",
        "--config",
        metavar="YAML",
    )
    override: tuple[str, ...] = repeated(
        "replace one value of --config; may be given many times",
        "-o",
        "--override",
        metavar="Section.key=value",
    )
    plugin: tuple[str, ...] = plugin_option()
    dtype: Literal["float32", "float16", "bfloat16", "q8_0", "q4_0", "q4_1"] | None = option(
        "element type (default: as in the source); q8_0, q4_0 and q4_1 need --to gguf"
    )
    tokenizer: str | None = option(
        "tokenizer files to put with the weights (default: the source's)", metavar="DIR"
    )
    merge: bool = switch("ppfleetx to ppfleetx: one rank directory, optimizer included")
    plan: str | None = option("ppfleetx to ppfleetx: rank directories of this plan", metavar="mp=N,pp=M")
    check_logits: bool = switch(
        "compare logits of source and result on random tokens (Hugging Face on one side)"
    )
    transformers: str | None = option(
        "with --check-logits: ask transformers too, with this interpreter, which has torch and transformers",
        metavar="PYTHON",
    )

    def run(self) -> None:
        plan = None if self.plan is None else parse_plan(self.plan)
        from ppfleetx.conversion.convert import Conversion, check_logits, convert, load_model_section
        from ppfleetx.conversion.hub import local_directory
        from ppfleetx.utils.log import configure_logging

        configure_logging()
        if self.override and self.yaml is None:
            raise ConfigError("-o changes values of --config, which is not given")
        job = Conversion(
            self.source,
            self.target,
            local_directory(self.input) if self.source == "hf" else Path(self.input),
            Path(self.output),
            model=None if self.yaml is None else load_model_section(self.yaml, self.override),
            dtype=self.dtype,
            merge=self.merge,
            plan=plan,
            tokenizer=None if self.tokenizer is None else Path(self.tokenizer),
        )
        if self.check_logits and ("hf" not in (self.source, self.target) or self.target == "gguf"):
            raise ConfigError(
                "--check-logits needs Hugging Face's format on one side, and does not check a GGUF result"
            )
        if self.transformers is not None and not self.check_logits:
            raise ConfigError("--transformers belongs to --check-logits")
        written = convert(job)
        print(f"written: {written}")
        if self.check_logits:
            difference = check_logits(job, written, python_with_transformers=self.transformers)
            rounded = "" if self.dtype is None else f", with the source's weights in {self.dtype}"
            print(f"logits of source and result differ by at most {difference:.3g}{rounded}")


def parse_plan(text: str) -> ParallelPlan:
    """Parse a tensor- and pipeline-parallel plan such as ``mp=2,pp=2``. Raises ConfigError if ``text`` has
    another axis, or a degree that is not a positive integer."""
    degrees = {}
    for part in text.split(","):
        axis, _, text_of_degree = part.strip().partition("=")
        degree = positive_int(text_of_degree)
        if axis not in ("mp", "pp") or degree is None:
            raise ConfigError(
                "must be mp=N, pp=M or both. Files are divided by tensor and pipeline rank only, and every "
                "plan reads every checkpoint",
                key="--plan",
                value=text,
            )
        degrees[axis] = degree
    return ParallelPlan(**degrees)


@dataclass(frozen=True, kw_only=True)
class Merge(Command):
    """Merge trained adapters (Model.lora) into the base weights, and write a checkpoint without adapters."""

    checkpoint: str | None = positional("CHECKPOINT", "the directory of a run, or one of its checkpoints")
    input: str | None = option("another way to name CHECKPOINT", metavar="DIR")
    output: str = option("a new or empty directory", default=MISSING, metavar="DIR")
    base: str | None = option("the frozen weights, for adapters saved alone (Model.lora.base)", metavar="DIR")
    plugin: tuple[str, ...] = plugin_option()

    def run(self) -> None:
        from ppfleetx.checkpoint.adapters import merge_lora
        from ppfleetx.utils.log import configure_logging

        configure_logging()
        named = [one for one in (self.checkpoint, self.input) if one is not None]
        if len(named) != 1:
            raise ConfigError("give CHECKPOINT, the directory of a model with adapters, once")
        print(f"written: {merge_lora(named[0], self.output, self.base)}")
