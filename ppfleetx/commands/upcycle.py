"""The verb ``upcycle``."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import MISSING, dataclass, replace
from pathlib import Path

from ppfleetx.checkpoint.upcycle import upcycled
from ppfleetx.checkpoint.weights import fitted
from ppfleetx.checkpoint.weights_only import read_ppfleetx, write_ppfleetx
from ppfleetx.commands.model_options import refuse_adapters
from ppfleetx.commands.options import OptionalConfigOptions, option, positional
from ppfleetx.commands.resolve_model import resolve_model
from ppfleetx.config.errors import CheckpointError, ConfigError, naming, shown
from ppfleetx.config.loader import load_config
from ppfleetx.config.resume_policy import network
from ppfleetx.config.sections.model import ModelConfig
from ppfleetx.config.sections.root import RunConfig
from ppfleetx.models.gpt.spec import parameter_count
from ppfleetx.utils.files import is_taken, refuse_unwritable
from ppfleetx.utils.log import configure_logging


@dataclass(frozen=True, kw_only=True)
class Upcycle(OptionalConfigOptions):
    """Make a mixture of experts of a dense model: each expert begins as a copy of the MLP.

    CHECKPOINT is the directory of a run, of one of its checkpoints, of Hugging Face or of FleetX. Routers get
    initial values. Without noise the mixture computes what the dense model does, until training tells its
    experts apart (docs/moe.md). -o sets other keys of Model.moe.
    """

    examples = """\
examples:
  ppfleetx upcycle output --experts 8 --output output-moe
  ppfleetx upcycle Llama-3.2-1B --experts 8 --top-k 2 -o Model.moe.layer_freq=2 --output llama-moe
  ppfleetx finetune --from output-moe --output trained
"""
    checkpoint: str = positional("CHECKPOINT", "the directory of a dense model", default=MISSING)
    output: str = option("a new or empty directory", default=MISSING, metavar="DIR")
    experts: int = option("experts of each layer", default=MISSING, key="Model.moe.num_experts")
    top_k: int | None = option(
        "experts that a token goes to (default: 2)", key="Model.moe.top_k", metavar="K"
    )
    noise: float = option(
        "add normal noise to each expert's matrices: this share of their standard deviation (default: 0)",
        default=0.0,
        metavar="S",
    )
    seed: int = option("of routers and noise (default: 0)", default=0)

    def run(self) -> None:
        """Write the mixture, and print the sizes before and after."""
        upcycle(self)


def upcycle(options: Upcycle) -> Path:
    """Write the mixture; return its step directory.

    Raises:
        UserError: what cannot be made a mixture, or not so, in words.
    """
    configure_logging()
    output = Path(options.output)
    if is_taken(output):
        raise ConfigError(
            "is there already; name a new or empty directory", key="--output", value=str(output)
        )
    refuse_unwritable(output, "--output")
    if not 0 <= options.noise <= 1:
        raise ConfigError("must be between 0 and 1", key="--noise", value=options.noise)
    with ExitStack() as stack:
        with naming("CHECKPOINT", options.checkpoint):
            place = resolve_model(options.checkpoint, stack, with_config=options.config is None)
        source = options.config or place.config
        dense = load_config(source, place.overrides())
        _check_dense(dense, options)
        mixture = load_config(source, place.overrides([*options.settings(), *options.override])).Model
        _check_mixture(mixture, dense.Model)
        weights = replace(read_ppfleetx(place.checkpoint), epoch=0, step=0)
        if place.tokenizer is not None:
            weights = weights.with_tokenizer(place.tokenizer)
        tensors = upcycled(fitted(weights, dense.Model), mixture, seed=options.seed, noise=options.noise)
        step = write_ppfleetx(weights, tensors, mixture, output)
    before, after = parameter_count(dense.Model), parameter_count(mixture)
    print(f"{before:,} parameters became {after:,}\nwritten: {step}", flush=True)
    return step


def _check_dense(cfg: RunConfig, options: Upcycle) -> None:
    refuse_adapters(cfg, options.checkpoint)
    if cfg.Model.moe is not None:
        raise CheckpointError(
            f"{options.checkpoint} is a mixture of {cfg.Model.moe.num_experts} experts. Experts are neither "
            "merged nor multiplied: no other number of them computes what these do"
        )


def _check_mixture(mixture: ModelConfig, dense: ModelConfig) -> None:
    moe = mixture.moe
    assert moe is not None
    if moe.expert_ffn_size not in (None, dense.ffn_size):
        raise ConfigError(
            f"each expert is a copy of the MLP, whose inner width is {dense.ffn_size}; leave it out",
            key="Model.moe.expert_ffn_size",
            value=moe.expert_ffn_size,
        )
    if moe.shared_experts is not None:
        rule = "the MLP becomes the experts, and nothing is left for shared ones"
        raise ConfigError(rule, key="Model.moe.shared_experts")
    if not moe.router.normalize or moe.router.scale != 1:
        raise ConfigError(
            "weights that do not add up to 1 would change what the model computes: leave normalize true and "
            "scale 1",
            key="Model.moe.router",
        )
    before, after = network(dense), network(mixture.model_copy(update={"moe": None}))
    if changed := [key for key in before if before[key] != after[key]]:
        raise ConfigError(
            f"is {shown(before[changed[0]])} in the checkpoint, and upcycling changes Model.moe alone",
            key=f"Model.{changed[0]}",
            value=after[changed[0]],
        )
