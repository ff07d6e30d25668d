"""Small classification and response tasks, and the finetuning program in the ranks of a pool."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ppfleetx.config.registries import CALLBACKS, CallbackTraits
from tests.e2e.program import ROOT, error_of, plan_overrides, records
from tests.helpers.ranks import Pools
from tests.helpers.texts import small_tokenizer

CONFIGS = ROOT / "ppfleetx/configs/nlp/gpt"
GLUE, SFT = "finetune_gpt_345M_single_card_glue", "finetune_gpt_345M_single_card_sft"
NUM_DEV = 61  # not a multiple of any batch

GOOD, BAD = ["quick", "lazy", "brown"], ["fox", "dog", "jumps"]
NEUTRAL = ["the", "over", "x", "self", "return", "def", "theirs", "we", "see"]

SETTINGS = {
    "Global.device": "cpu",
    "Global.local_batch_size": "null",
    "Global.global_batch_size": 16,
    "Global.micro_batch_size": 8,
    "Engine.mix_precision.enable": False,  # on every device; the shipped file says auto
    "Model.vocab_size": 400,
    "Model.hidden_size": 64,
    "Model.num_layers": 2,
    "Model.num_attention_heads": 4,
    "Model.ffn_hidden_size": 128,
    "Model.max_position_embeddings": 40,
    "Model.initializer_range": 0.1,
    "Model.hidden_dropout_prob": 0.0,
    "Model.attention_probs_dropout_prob": 0.0,
    "Optimizer.lr.max_lr": 5e-3,
    "Engine.logging_freq": 1,
}


def write_files(directory: Path) -> Path:
    """SST-2 whose label follows from one word, prompts whose response follows from them, and a tokenizer."""
    generator = random.Random(0)
    small_tokenizer(400).save(directory / "tokenizer")
    for part, count in (("train", 192), ("dev", NUM_DEV), ("test", 10)):
        rows = [_sentence(generator) for _ in range(count)]
        lines = [f"{text}\t{label}" for text, label in rows]
        if part == "test":
            lines = [f"{index}\t{text}" for index, (text, _) in enumerate(rows)]
        header = "index\tsentence" if part == "test" else "sentence\tlabel"
        (directory / f"{part}.tsv").write_text("\n".join([header, *lines]) + "\n")
        pairs = [{"prompt": f"{text}: ", "response": ["fox", "quick"][label]} for text, label in rows]
        (directory / f"{part}.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    return directory


def _sentence(generator: random.Random) -> tuple[str, int]:
    label = generator.randrange(2)
    words = [generator.choice(NEUTRAL) for _ in range(generator.randrange(4))]
    words.insert(generator.randrange(len(words) + 1), generator.choice(GOOD if label else BAD))
    return " ".join(words), label


def settings(files: Path, output_dir: Path, **more: Any) -> dict[str, Any]:
    """Overrides of a small run on :func:`write_files`; ``more`` by dotted key with ``__`` for dots."""
    values = {
        **SETTINGS,
        "Data.tokenizer.dir": files / "tokenizer",
        "Engine.save_load.output_dir": output_dir,
    }
    for mode in ("Train", "Eval"):
        values |= {f"Data.{mode}.dataset.input_dir": files, f"Data.{mode}.dataset.max_seq_len": 40}
    values |= {key.replace("__", "."): value for key, value in more.items()}
    return {key: str(value) for key, value in values.items()}


def run(pools: Pools, plan: Any, values: Mapping[str, Any], config: str = GLUE) -> list[dict[str, Any]]:
    """Train under ``plan``; the records of metrics.jsonl."""
    values = {**values, **plan_overrides(plan, 4 if plan.pp > 1 else 16 // plan.data_size)}
    pools(plan.world_size).run(
        "tests.e2e.finetuning:train", values=values, world=plan.world_size, config=config
    )
    return records(Path(values["Engine.save_load.output_dir"]))


def losses(found: list[dict[str, Any]]) -> list[float]:
    """Losses and gradient norms of the steps, and losses of the evaluations."""
    return [number for r in found for number in (r["loss"], r.get("grad_norm", 1.0))]


def metrics(found: list[dict[str, Any]]) -> list[dict[str, float]]:
    """What each evaluation measured."""
    return [record["metrics"] for record in found if record["kind"] == "eval"]


def _load(values: Mapping[str, Any], world: int, config: str) -> tuple[Any, Any]:
    from ppfleetx.config.loader import load_config
    from ppfleetx.distributed.init import init_distributed

    given = [f"{key}={value}" for key, value in values.items()]
    cfg = load_config(CONFIGS / f"{config}.yaml", given, world_size=world)
    return cfg, init_distributed(cfg)


CALLBACKS.register("stop_after", "tests.e2e.finetuning:stop_after", traits=CallbackTraits(ranks="all"))


def stop_after(run: Any, steps: int) -> Any:
    """A callback that does what Ctrl-C does, after so many steps."""
    import os
    import signal

    from ppfleetx.core.engine.callbacks.base import Callback

    class Stop(Callback):
        def on_step_end(self, engine: Any, record: Any) -> None:
            if record.step == steps:
                os.kill(os.getpid(), signal.SIGTERM)

    return Stop()


def train(values: Mapping[str, Any], world: int, config: str, stop_after: int | None = None) -> None:
    """In a rank: tools/train.py without starting Paddle; interrupted after ``stop_after`` steps."""
    import paddle

    from ppfleetx.commands.train import train

    if stop_after is not None:
        stop = f"[default, {{name: stop_after, options: {{steps: {stop_after}}}}}]"
        values = {**values, "Engine.callbacks": stop}
    with paddle.utils.unique_name.guard():
        train(*_load(values, world, config))


def evaluate(values: Mapping[str, Any], world: int, config: str = GLUE) -> dict[str, float]:
    """In a rank: what tools/eval.py measures."""
    import paddle

    from ppfleetx.commands.train import evaluate

    with paddle.utils.unique_name.guard():
        [record] = evaluate(*_load(values, world, config))
    return {"loss": record.loss, **record.metrics}


def logits(values: Mapping[str, Any], world: int, config: str = GLUE) -> list[list[float]]:
    """In a rank: the outputs for fixed tokens with the weights of ``ckpt_dir``, by position 0 to 7."""
    import numpy as np
    import paddle

    from ppfleetx.commands.train import build_runner, find_weights

    with paddle.utils.unique_name.guard():
        cfg, ctx = _load(values, world, config)
        start, runner = find_weights(cfg, ctx), build_runner(cfg, ctx, train=False)
        start.restore_weights(runner, cfg.Model)
        tokens = np.random.default_rng(0).integers(0, 390, (2, 8))
        (found,) = runner.compute(lambda model, batch: model(batch["tokens"]), [{"tokens": tokens}])
    return found[..., :390].reshape(-1, min(found.shape[-1], 390)).tolist()


def refused(values: Mapping[str, Any], world: int, config: str = GLUE) -> str:
    """In a rank: the user's error that training ends with."""
    return error_of(train, values, world, config)
