"""What a valid configuration may ask for and this program cannot run yet, in one place.

A feature that arrives deletes its lines here.
"""

from __future__ import annotations

from collections.abc import Callable

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


def on_the_host(cfg: RunConfig, device: str) -> list[str]:
    """Sentences, each naming its key, for what a run on Ascend computes on the host, with copies, because the
    plugin has no kernel for it; ``docs/devices/ascend.md`` has the list."""
    if device != "npu":
        return []
    reasons = [(key, what) for applies, key, what in _NPU_ON_HOST if applies(cfg)]
    return [
        f"{key}: Ascend's plugin (of October 2024) has no {what}; the host does it" for key, what in reasons
    ]


_NPU_ON_HOST: tuple[tuple[Callable[[RunConfig], bool], str, str], ...] = (
    (
        lambda cfg: cfg.Engine.mix_precision.dtype == "bfloat16" and _learns_bounds(cfg),
        "Compress.Quantization",
        "subtraction in bfloat16, which PACT needs",
    ),
    (
        lambda cfg: cfg.Model.module == "GPTEvalModule",
        "Model.module = GPTEvalModule",
        "scatter in float64, nor index_select in bfloat16",
    ),
    (
        lambda cfg: cfg.Model.module == "GPTGenerationModule",
        "Model.module = GPTGenerationModule",
        "put_along_axis, nor cumulative sums in float64, for choosing tokens",
    ),
)


def _learns_bounds(cfg: RunConfig) -> bool:
    quantization = cfg.Compress.quantization
    return quantization is not None and "PACT" in (
        quantization.weight_preprocess_type,
        quantization.activation_preprocess_type,
    )
