"""The verbs that make a new model from a checkpoint: ``quantize``, ``prune`` and ``upcycle``.

``--help`` imports only this file: each verb imports its implementation when it runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from ppfleetx.commands.options import (
    OptionalConfigOptions,
    option,
    positional,
    repeated,
    switch,
    whole_number,
)
from ppfleetx.compress import Criterion, Part
from ppfleetx.config.errors import CheckpointError, ConfigError, naming
from ppfleetx.utils.launcher_env import world_size
from ppfleetx.utils.output_files import is_taken, refuse_unwritable

if TYPE_CHECKING:
    from ppfleetx.compress.calibration_data import Samples
    from ppfleetx.config.sections.root import RunConfig
    from ppfleetx.data.tokenizer.tokenizer import Tokenizer

_LONGEST = 512  # maximum number of tokens in a calibration window


@dataclass(frozen=True, kw_only=True)
class RewritingOptions(OptionalConfigOptions):
    """Base class of verbs (subcommands) that make a new model from a checkpoint. It has the options for input
    and output."""

    checkpoint: str = positional("CHECKPOINT", "the directory of a model", default=MISSING)
    output: str = option("a new or empty directory", default=MISSING, metavar="DIR")

    def check(self) -> None:
        """Raise ConfigError if the output directory is not empty or cannot be written."""
        if is_taken(Path(self.output)):
            raise ConfigError(
                "exists already; name a new or empty directory", key="--output", value=self.output
            )
        refuse_unwritable(Path(self.output), "--output")


@dataclass(frozen=True, kw_only=True)
class CalibratedOptions(RewritingOptions):
    """Base class of ``quantize`` and ``prune``. It has the options for input, output and calibration data."""

    samples: int = option("windows to calibrate on (default: 64)", default=64, type=whole_number)
    calibration: str | None = option(
        "a corpus (prefix of .bin/.idx) or a .txt file; its last tenth measures the perplexity",
        metavar="DATA",
    )

    def check(self) -> None:
        """Raise ConfigError if more than one process was started. Also check the output directory, as the
        base class does.
        """
        super().check()
        if world_size() > 1:
            raise ConfigError("one process does this; the result loads under any plan")


@contextmanager
def open_model(options: RewritingOptions) -> Iterator[tuple[RunConfig, Path, Tokenizer | None]]:
    """Context manager that yields the model that the options name: its configuration for a single process,
    the checkpoint's directory, and the tokenizer or None."""
    from ppfleetx.checkpoint.model_only import load_tokenizer
    from ppfleetx.commands.resolve_model import as_replicas, resolve_model
    from ppfleetx.config.loader import load_config

    with ExitStack() as stack:
        with naming("CHECKPOINT", options.checkpoint):
            place = resolve_model(options.checkpoint, stack, with_config=options.config is None)
        given = [*options.settings(), *options.override]
        cfg = load_config(options.config or place.config, place.overrides(given))
        cfg, _ = as_replicas(cfg, 1)
        tokenizer = None if place.tokenizer is None else load_tokenizer(place.tokenizer)
        yield cfg, place.checkpoint, tokenizer


def refuse_quantized_or_adapted(cfg: RunConfig, place: str) -> None:
    """Raise CheckpointError if the model's weights are quantized, or if it has adapters. ``place`` names the
    model in the error message."""
    if cfg.Compress.Weights is not None:
        raise CheckpointError(
            f"{place} is quantized (Compress.Weights in its configuration): take the checkpoint it was made "
            "from, and quantize the result. Rounding twice loses more than once"
        )
    if cfg.Model.lora is not None:
        raise CheckpointError(
            f"{place} has adapters (Model.lora); add them to the weights first: "
            f"ppfleetx merge {place} --output MERGED"
        )


def calibration_samples(
    cfg: RunConfig, options: CalibratedOptions, tokenizer: Tokenizer | None, min_tokens: int
) -> Samples | None:
    """Read the data that ``--calibration`` names, or return None if the option is not given. ``min_tokens``
    is the minimum number of calibration tokens."""
    if options.calibration is None:
        return None
    from ppfleetx.compress.calibration_data import read_samples

    return read_samples(
        options.calibration,
        tokenizer,
        vocab_size=cfg.Model.vocab_size,
        seq_len=min(cfg.Model.max_position_embeddings, _LONGEST),
        num_windows=options.samples,
        min_tokens=min_tokens,
    )


@dataclass(frozen=True, kw_only=True)
class Quantize(CalibratedOptions):
    """Store the weights of a checkpoint in 8 or 4 bits.

    CHECKPOINT is a directory: a run, one of its checkpoints, or a model of Hugging Face or FleetX. The result
    can be used for generation, evaluation, serving and export, under any plan, but it cannot be trained. The
    word embedding and the output head have 8 bits, even with --to int4.
    """

    examples = """\
examples:
  ppfleetx quantize output --to int8 --output output-int8
  ppfleetx quantize output --to int4 --method gptq --calibration data/train --output output-int4
  ppfleetx quantize output --to int8 --smooth --calibration data/train --output output-w8a8
  ppfleetx quantize output-of-qat --to int8 --activations int8 --output output-int8
  ppfleetx generate output-int8 "Once upon a time"
"""
    to: Literal["int8", "int4"] = option(
        "bits of the weights; groups of input features have a scale and an offset for each output channel",
        default=MISSING,
    )
    group: int | None = option(
        "input features of a group, a multiple of 8 (default: the largest of 32, 16 and, with int4, 8 that "
        "divides those of all layers)"
    )
    method: Literal["rtn", "gptq"] = option(
        "round to the nearest (default), or let later weights make up for the error (GPTQ)", default="rtn"
    )
    smooth: bool = switch(
        "8 bits for activations too, after their outliers were moved into the weights (SmoothQuant)"
    )
    activations: Literal["int8"] | None = option(
        "8 bits for activations, too: faster. With groups (--group, or --to int4) each group of a token's "
        "features has a scale; without, a token has one: for a model that was trained with quantization"
    )
    skip: tuple[str, ...] = repeated(
        "leave layers as they are, by canonical name: head, embedding.*, '*.mlp.fc2'; may be repeated",
        metavar="PATTERN",
    )

    program = "quantize:quantize"


@dataclass(frozen=True, kw_only=True)
class Prune(CalibratedOptions):
    """Remove attention heads, feed-forward units, experts and layers from a checkpoint.

    CHECKPOINT is a directory: a run, one of its checkpoints, or a model of Hugging Face or FleetX. Every
    layer loses the same number of heads, units or experts, so the result can be trained and used like any
    other model. A little training recovers most of the loss in quality (docs/compress.md).
    """

    examples = """\
examples:
  ppfleetx prune output --ratio 0.25 --output output-pruned
  ppfleetx prune output --ratio 0.25 --criterion saliency --calibration data/train --output output-pruned
  ppfleetx prune output --drop-layers 9 10 --output output-shallow
  ppfleetx prune moe --part experts --ratio 0.5 --criterion usage --calibration data/train --output few
  ppfleetx finetune --from output-pruned --output recovered
"""
    ratio: float = option(
        "share of the heads and units, or of the experts, taken out of each layer, rounded down (default: 0)",
        default=0.0,
        metavar="R",
    )
    criterion: Criterion = option(
        "what matters least: weights with the smallest sum of magnitudes (default) or squares (of an expert: "
        "the router's), what the loss would miss least (saliency), or experts with the smallest share of the "
        "routed weight (usage)",
        default="l1_norm",
    )
    part: Part = option(
        "what is pruned: heads and units (default), one of them, or whole experts", default="both"
    )
    multiple: int = option(
        "what stays is rounded up to a multiple of N, such as a tensor- or expert-parallel degree (default: "
        "1)",
        default=1,
    )
    drop_layers: tuple[int, ...] = option("layers to leave out, from 0", default=(), metavar="I")
    calibration: str | None = option(
        "for saliency and usage: a corpus (prefix of .bin/.idx) or a .txt file", metavar="DATA"
    )

    program = "prune:prune"


@dataclass(frozen=True, kw_only=True)
class Upcycle(RewritingOptions):
    """Make a mixture of experts from a dense model. Each expert starts as a copy of the MLP.

    CHECKPOINT is a directory: a run, one of its checkpoints, or a model of Hugging Face or FleetX. The
    routers start from random values. Without --noise, the untrained mixture computes the same outputs as the
    dense model (docs/moe.md). -o sets other keys of Model.moe.
    """

    examples = """\
examples:
  ppfleetx upcycle output --experts 8 --output output-moe
  ppfleetx upcycle Llama-3.2-1B --experts 8 --top-k 2 -o Model.moe.layer_freq=2 --output llama-moe
  ppfleetx finetune --from output-moe --output trained
"""
    experts: int = option("experts of each layer", default=MISSING, key="Model.moe.num_experts")
    top_k: int | None = option(
        "experts that a token goes to (default: 2)", key="Model.moe.top_k", metavar="K"
    )
    noise: float = option(
        "add normal noise to each expert's matrices: this share of their standard deviation (default: 0)",
        default=0.0,
        metavar="S",
    )
    seed: int = option("seed of routers and noise (default: 0)", default=0)

    program = "upcycle:upcycle"
