"""What a valid configuration may ask for and this program cannot run yet, in one place.

A feature that arrives deletes its lines here.
"""

from __future__ import annotations

from ppfleetx.config.sections import RunConfig


def not_supported_reasons(cfg: RunConfig, device: str) -> list[str]:
    """Sentences, each naming its key, for what ``cfg`` asks for and cannot be run; empty: all of it can.

    Args:
        cfg: a loaded configuration.
        device: the device the run has resolved to, ``cpu`` or ``gpu`` (or another name of Global.device).
    """
    sharding, model = cfg.Distributed.sharding, cfg.Model
    compress, precision = cfg.Compress, cfg.Engine.mix_precision
    table: list[tuple[bool, str]] = [
        (
            sharding.sharding_offload,
            "Distributed.sharding.sharding_offload = True: states cannot be kept in host memory yet; more "
            "sharding ranks or Model.use_recompute save memory too",
        ),
        (
            device == "cpu" and precision.enable,
            f"Engine.mix_precision.enable = True: Paddle has no {precision.dtype} kernels for the CPU; "
            "compute in float32 with -o Engine.mix_precision.enable=False",
        ),
        (
            device != "cpu" and precision.enable,
            "Engine.mix_precision.enable = True: only float32 can be run yet; give "
            "-o Engine.mix_precision.enable=False",
        ),
        (
            device not in ("cpu", "gpu"),
            f"Global.device = {device}: only cpu and gpu can be used yet",
        ),
        (
            bool(compress.Quantization and compress.Quantization.enable),
            "Compress.Quantization.enable = True: quantisation-aware training cannot be run yet",
        ),
        (
            bool(compress.Prune and compress.Prune.enable),
            "Compress.Prune.enable = True: pruning cannot be run yet",
        ),
        (
            compress.pretrained is not None,
            "Compress.pretrained: compression cannot be run yet; to start from weights use "
            "Engine.save_load.init_from",
        ),
        (
            cfg.Inference.TensorRT is not None,
            "Inference.TensorRT: exported models cannot be run with TensorRT yet",
        ),
        (
            model.module in ("GPTFinetuneModule", "GPTEvalModule"),
            f"Model.module = {model.module}: only GPTModule and GPTGenerationModule can be run yet",
        ),
    ]
    return [reason for applies, reason in table if applies]


def without_effect(cfg: RunConfig) -> list[str]:
    """Sentences, each naming its key, for speed options that change no result and are not built yet."""
    table: list[tuple[bool, str]] = [
        (
            cfg.Model.fused_linear,
            "Model.fused_linear = True has no effect yet: matrix product and bias are separate kernels",
        ),
    ]
    return [reason for applies, reason in table if applies]
