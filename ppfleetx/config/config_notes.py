"""What a valid configuration may ask for and this program cannot run yet, in one place.

A feature that arrives deletes its lines here.
"""

from __future__ import annotations

from ppfleetx.config.sections.root import RunConfig


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
