"""What an exported program can do, said before Paddle is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from ppfleetx.config.errors import ConfigError
from ppfleetx.config.sections.generation import GenerationConfig
from ppfleetx.config.sections.root import RunConfig
from ppfleetx.utils.machine import CPUINFO, flags_in, read_cpuinfo

_BF16_FLAGS = ("avx512_bf16", "amx_bf16")
_INSTEAD = "generate from the checkpoint with ppfleetx generate"


def check_generation(section: GenerationConfig, places: Mapping[str, str] | None = None) -> None:
    """Whether an exported program decodes as the ``Generation`` section says.

    Args:
        places: where keys were written.

    Raises:
        ConfigError: it does not.
    """
    key, rule = None, ""
    if section.decode_strategy == "beam_search":
        key, rule = "decode_strategy", "an exported program decodes by greedy_search or sampling"
    elif not section.use_cache:
        key, rule = "use_cache", "an exported program always keeps keys and values"
    elif section.forced_bos_token_id is not None:
        key, rule = "forced_bos_token_id", "an exported program chooses every token"
    elif section.forced_eos_token_id is not None:
        key, rule = "forced_eos_token_id", "an exported program chooses every token"
    if key is not None:
        name = f"Generation.{key}"
        raise ConfigError(
            f"{rule}; leave it out, or {_INSTEAD}",
            key=name,
            value=getattr(section, key),
            place=(places or {}).get(name),
        )


def check_onednn(section: GenerationConfig, vocab_size: int, places: Mapping[str, str] | None = None) -> None:
    """Whether an exported program that oneDNN runs decodes as the ``Generation`` section says.

    Of sampling it does when only the likeliest are drawn from. From the whole vocabulary, Paddle 3.3.1 ends
    with an exception that has no text.

    Args:
        vocab_size: tokens that may be generated.
        places: where keys were written.

    Raises:
        ConfigError: it does not.
    """
    if section.decode_strategy == "sampling" and not 0 < section.top_k < vocab_size:
        raise ConfigError(
            f"with Inference.onednn, sampling is from the 1 to {vocab_size - 1} likeliest tokens (in Paddle "
            "3.3.1 anything else ends in an error without words); give another top_k, or "
            "-o Inference.onednn=False",
            key="Generation.top_k",
            value=section.top_k,
            place=(places or {}).get("Generation.top_k"),
        )


def check_inference(cfg: RunConfig, device: str) -> None:
    """Whether this machine can run an exported program as the ``Inference`` section says.

    Raises:
        ConfigError: it cannot.
    """
    options = cfg.Inference
    if options.mp_degree not in (None, 1):
        raise _refusal(
            cfg,
            "mp_degree",
            "an export holds the whole model (Paddle's export leaves out communication without a word), so "
            f"this is 1; for a model larger than one device, {_INSTEAD} under Distributed.mp_degree",
        )
    if device != "cpu":
        for key, plain in (("onednn", False), ("precision", "fp32"), ("cpu_threads", None)):
            if getattr(options, key) != plain:
                raise _refusal(cfg, key, f"is for the CPU, and Global.device is {device}")
        return
    if options.TensorRT is not None:
        raise _refusal(
            cfg, "TensorRT", "TensorRT needs a GPU, and Global.device is the CPU; set Inference.TensorRT=null"
        )
    if options.precision == "bf16" and not has_bfloat16():
        raise _refusal(cfg, "precision", f"this CPU has none of {', '.join(_BF16_FLAGS)}; use fp32")


def has_bfloat16(cpuinfo: Path = CPUINFO) -> bool:
    """Whether the CPU described by ``cpuinfo`` multiplies in bfloat16."""
    return not flags_in(read_cpuinfo(cpuinfo)).isdisjoint(_BF16_FLAGS)


def _refusal(cfg: RunConfig, key: str, rule: str) -> ConfigError:
    name = f"Inference.{key}"
    value = getattr(cfg.Inference, key)
    shown = {} if key == "TensorRT" else {"value": value}
    return ConfigError(rule, key=name, place=cfg.origins.get(name), **shown)
