"""Check of ``ppfleetx doctor``: train a tiny GPT and a tiny Llama for a few steps, and compare the losses
with the expected losses in ``losses.json``."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import paddle

from ppfleetx.config.loader import load_config
from ppfleetx.config.shipped import CONFIGS
from ppfleetx.core.module.build import build_module
from ppfleetx.distributed.context import ParallelContext
from ppfleetx.distributed.device import allow_tf32, is_card
from ppfleetx.doctor.results import Row, Target, fail, lacks, ok, skipped
from ppfleetx.parallel.parallelize import parallelize
from ppfleetx.utils.device_support import HALF_TYPES

GOLDEN = Path(__file__).with_name("losses.json")
MODELS = {"GPT": "debug/gpt_nano.yaml", "Llama": "debug/llama_nano.yaml"}
STEPS, SEQUENCES, LENGTH, VOCABULARY = 3, 4, 32, 512
_LEARNING_RATE = 1e-3
_HALF_MODES = tuple((dtype, level) for dtype in HALF_TYPES for level in ("O1", "O2"))
TOLERANCE = {"cpu": 1e-5, "card": 1e-4, "half": 2e-2}
"""Largest allowed relative difference from the losses in ``losses.json``: for float32 on a CPU, for float32
on a card, and for 16-bit types."""


def losses(target: Target) -> Iterator[Row]:
    """Train a tiny GPT and a tiny Llama, and compare their losses with the expected losses. On a card, this
    is repeated with recomputation and in 16-bit types."""
    golden = json.loads(GOLDEN.read_text("utf-8"))["losses"]
    allow_tf32(False)
    device, tolerance = target.device, TOLERANCE["card" if is_card(target.device) else "cpu"]
    for model in MODELS:
        yield losses_row(f"{model} float32", train(model, device), golden[model], tolerance)
        if not is_card(device):
            yield skipped(f"{model} 16 bits", "the CPU computes in float32")
            continue
        recomputed = train(model, device, ["Model.use_recompute=True", "Model.recompute_granularity=full"])
        yield losses_row(f"{model} recompute", recomputed, golden[model], tolerance)
        for dtype, level in _HALF_MODES:
            if lacks(dtype):
                yield skipped(f"{model} {dtype} {level}", f"this card does not compute in {dtype}")
                continue
            mixed = {"enable": True, "dtype": dtype, "level": level}
            given = [f"Engine.mix_precision.{key}={value}" for key, value in mixed.items()]
            found = train(model, device, given)
            yield losses_row(f"{model} {dtype} {level}", found, golden[model], TOLERANCE["half"])


def losses_row(name: str, found: Sequence[float], expected: Sequence[float], tolerance: float) -> Row:
    array = np.asarray(expected)
    worst = float(np.max(np.abs(np.asarray(found) - array) / np.abs(array)))
    text = f"losses of {len(found)} steps are {_shown(found)}"
    if not worst <= tolerance:  # also true for NaN
        return fail(
            name,
            f"{text} and should be {_shown(expected)}: off by {worst:.1e}, more than {tolerance:g}",
            "this machine computes wrongly: another version of Paddle, a changed kernel, FLAGS of the "
            "environment, or a defect of memory or device; compare with another machine",
            relative_error=worst,
        )
    return ok(name, f"{text}, off by {worst:.0e} (allowed {tolerance:g})", relative_error=worst)


def _shown(losses: Sequence[float]) -> str:
    return ", ".join(f"{loss:.6f}" for loss in losses)


def train(model: str, device: str, overrides: Sequence[str] = ()) -> list[float]:
    """Train a model of :data:`MODELS` for a few steps in this process, and return each step's loss."""
    given = [
        f"Global.device={device}",
        f"Global.local_batch_size={SEQUENCES}",
        "Model.hidden_dropout_prob=0",
        "Model.attention_probs_dropout_prob=0",
        *overrides,
    ]
    cfg = load_config(str(CONFIGS / MODELS[model]), given, world_size=1)
    with paddle.utils.unique_name.guard():
        runner = parallelize(build_module(cfg), cfg, ParallelContext.single(device), train=True)
        return [_step(runner, cfg, step) for step in range(STEPS)]


def _step(runner: Any, cfg: Any, step: int) -> float:
    whole = batch(step)
    rows = np.split(np.arange(SEQUENCES), cfg.batch.accumulate_steps)
    pieces = [{name: array[part] for name, array in whole.items()} for part in rows]
    return runner.train_step(pieces, step=step + 1, lr=_LEARNING_RATE, weight_decay=0.01).loss


def batch(step: int) -> dict[str, np.ndarray]:
    """Return the batch of a training step. A formula computes the tokens, because random number generators
    can differ between library versions."""
    place = np.arange(SEQUENCES * (LENGTH + 1)).reshape(SEQUENCES, LENGTH + 1) + 1000 * step
    tokens = (place * place * 7 + place * 13 + 5) % (VOCABULARY - 3)
    return {
        "tokens": tokens[:, :-1],
        "labels": tokens[:, 1:],
        "loss_mask": np.ones((SEQUENCES, LENGTH), np.float32),
        "position_ids": np.tile(np.arange(LENGTH), (SEQUENCES, 1)),
    }
