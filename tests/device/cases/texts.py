"""In a rank: text from a model on the device, and from its export."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ppfleetx.config.sections.root import InferenceConfig
from ppfleetx.distributed.device import allow_tf32
from tests.deploy.exports import STYLES, configuration

PROMPTS = ("the cat", "and the other", "hat the cat and the hat")


def generate(
    run: str, style: str, device: str, strategies: Mapping[str, Sequence[str]]
) -> dict[str, list[str]]:
    """Texts of a checkpoint by strategy; a strategy is a list of overrides."""
    import paddle

    from ppfleetx.commands.generate import load_generator
    from ppfleetx.distributed.init import init_distributed

    allow_tf32(False)
    found = {}
    with paddle.utils.unique_name.guard():
        cfg = configuration(Path(run), STYLES[style], f"Global.device={device}")
        generator = load_generator(cfg, init_distributed(cfg))
        for name, overrides in strategies.items():
            cfg = configuration(Path(run), STYLES[style], f"Global.device={device}", *overrides)
            found[name] = _texts(generator.generate(list(PROMPTS), cfg.Generation, seed=11))
    return found


def generate_with_few_bits(run: str, device: str, dtype: str) -> list[str]:
    """Greedy texts of a quantized checkpoint, in ``dtype``."""
    import json

    import paddle

    from ppfleetx.commands.generate import load_generator
    from ppfleetx.config.loader import load_config
    from ppfleetx.distributed.init import init_distributed

    allow_tf32(False)
    (step,) = Path(run).glob("epoch_*")
    file = Path(run) / "generation.yaml"
    precision = {"enable": True, "dtype": dtype, "level": "O2"} if dtype != "float32" else {"enable": False}
    file.write_text(
        json.dumps(
            {
                "_base_": str(step / "config.yaml"),
                "Global": {"device": device},
                "Model": {"module": "GPTGenerationModule"},
                "Engine": {"mix_precision": precision, "save_load": {"ckpt_dir": run}},
                "Generation": {"decode_strategy": "greedy_search", "max_dec_len": 24},
            }
        )
    )
    with paddle.utils.unique_name.guard():
        cfg = load_config(file)
        generator = load_generator(cfg, init_distributed(cfg))
        return _texts(generator.generate(list(PROMPTS), cfg.Generation, seed=11))


def _texts(generations: Any) -> list[str]:
    return [one.text for each in generations for one in each]


def export(run: str, style: str, device: str, directory: str) -> str:
    """Export a checkpoint from ``device``; where to."""
    import paddle

    from ppfleetx.commands.generate import load_generator
    from ppfleetx.deploy.export import export
    from ppfleetx.distributed.init import init_distributed

    place = f"Engine.save_load.output_dir={directory}"
    with paddle.utils.unique_name.guard():
        cfg = configuration(Path(run), STYLES[style], f"Global.device={device}", place)
        ctx = init_distributed(cfg)
        return str(export(cfg, ctx, load_generator(cfg, ctx)))


def infer(
    exported: str, device: str, run: str, style: str, strategies: Mapping[str, Sequence[str]]
) -> dict[str, list[str]]:
    """Texts of an export that runs on ``device``."""
    from ppfleetx.deploy.inference_engine import InferenceEngine

    allow_tf32(False)
    engine = InferenceEngine(InferenceConfig(model_dir=exported, cpu_threads=1), device=device)
    found = {}
    for name, overrides in strategies.items():
        cfg = configuration(Path(run), STYLES[style], *overrides)
        found[name] = _texts(engine.generate(list(PROMPTS), cfg.Generation, seed=11))
    return found
