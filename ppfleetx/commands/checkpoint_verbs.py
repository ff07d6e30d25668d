"""Options and steps that ``quantize`` and ``prune`` share, which make a checkpoint smaller."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ppfleetx.checkpoint.weights_only import load_tokenizer
from ppfleetx.commands.options import OptionalConfigOptions, option, positional
from ppfleetx.commands.resolve_model import as_replicas, resolve_model
from ppfleetx.config.errors import CheckpointError, ConfigError, naming
from ppfleetx.config.loader import load_config
from ppfleetx.config.sections.root import RunConfig
from ppfleetx.utils.files import is_taken, refuse_unwritable

if TYPE_CHECKING:
    from ppfleetx.compress.samples import Samples
    from ppfleetx.data.tokenizer.tokenizer import Tokenizer

_LONGEST = 512  # tokens of a window


@dataclass(frozen=True, kw_only=True)
class RewritingOptions(OptionalConfigOptions):
    """The options of verbs that make another model of a checkpoint."""

    checkpoint: str = positional("CHECKPOINT", "the directory of a model", default=MISSING)
    output: str = option("a new or empty directory", default=MISSING, metavar="DIR")

    def check(self) -> None:
        """Refuse an output that holds something or cannot be made."""
        if is_taken(Path(self.output)):
            raise ConfigError(
                "is there already; name a new or empty directory", key="--output", value=self.output
            )
        refuse_unwritable(Path(self.output), "--output")


@dataclass(frozen=True, kw_only=True)
class ShrinkingOptions(RewritingOptions):
    """The options that ``quantize`` and ``prune`` share."""

    samples: int = option("windows to calibrate on (default: 64)", default=64)
    calibration: str | None = option(
        "a corpus (prefix of .bin/.idx) or a .txt file; its last tenth measures the perplexity",
        metavar="DATA",
    )

    def check(self) -> None:
        """Refuse such an output, and a calibration of no samples."""
        super().check()
        if self.samples < 1:
            raise ConfigError("must be at least 1", key="--samples", value=self.samples)


@contextmanager
def open_model(options: RewritingOptions) -> Iterator[tuple[RunConfig, Path, Tokenizer | None]]:
    """Configuration for one process, directory of the checkpoint, and tokenizer where there is one."""
    with ExitStack() as stack:
        with naming("CHECKPOINT", options.checkpoint):
            place = resolve_model(options.checkpoint, stack, with_config=options.config is None)
        given = [*options.settings(), *options.override]
        cfg = load_config(options.config or place.config, place.overrides(given))
        cfg, _ = as_replicas(cfg, 1)
        tokenizer = None if place.tokenizer is None else load_tokenizer(place.tokenizer)
        yield cfg, place.checkpoint, tokenizer


def refuse_adapters(cfg: RunConfig, place: str) -> None:
    """Raise CheckpointError where adapters lie beside the weights."""
    if cfg.Model.lora is not None:
        raise CheckpointError(
            f"{place} has adapters (Model.lora); add them to the weights first: "
            f"ppfleetx merge --input {place} --output MERGED"
        )


def calibration_samples(
    cfg: RunConfig, options: ShrinkingOptions, tokenizer: Tokenizer | None, fewest: int
) -> Samples | None:
    """Windows of the calibration data, at least `fewest` tokens; None where none was named."""
    if options.calibration is None:
        return None
    from ppfleetx.compress.samples import read_samples

    return read_samples(
        options.calibration,
        tokenizer,
        vocab_size=cfg.Model.vocab_size,
        seq_len=min(cfg.Model.max_position_embeddings, _LONGEST),
        num_windows=options.samples,
        fewest=fewest,
    )
