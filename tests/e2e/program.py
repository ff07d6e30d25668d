"""The whole training program in the ranks of a pool (tests/helpers/ranks.py), under any plan."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from itertools import count
from pathlib import Path
from typing import Any
from unittest import mock

from ppfleetx.config.errors import DataError
from ppfleetx.config.parallel_plan import CONFIG_KEYS, ParallelPlan
from tests.helpers.programs import ROOT
from tests.helpers.ranks import Pools

NANO = ROOT / "ppfleetx/configs/debug/gpt_nano.yaml"
GLOBAL_BATCH, SEQ_LEN = 16, 16

# Dropout is off: its masks belong to a replica. The vocabulary is padded, the embedding tied.
SETTINGS = {
    "Global.global_batch_size": GLOBAL_BATCH,
    "Global.local_batch_size": "null",
    "Engine.max_steps": 6,
    "Engine.eval_freq": 0,
    "Engine.save_load.save_steps": 3,
    "Model.vocab_size": 512,
    "Model.vocab_size_divisible_unit": 96,
    "Model.hidden_size": 32,
    "Model.num_layers": 8,
    "Model.num_attention_heads": 4,
    "Model.hidden_dropout_prob": 0.0,
    "Model.attention_probs_dropout_prob": 0.0,
    "Model.initializer_range": 0.1,
    "Data.Train.dataset.max_seq_len": SEQ_LEN,
    "Data.Eval.dataset.max_seq_len": SEQ_LEN,
}


def plan_overrides(plan: ParallelPlan, micro_batch_size: int | None = None) -> dict[str, Any]:
    """Overrides that ask for ``plan``; micro batches small enough for its pipeline unless given."""
    values = {f.name: getattr(plan, f.name) for f in fields(plan) if getattr(plan, f.name) != f.default}
    local = GLOBAL_BATCH // plan.data_size
    micro = micro_batch_size or max(1, local // (2 if plan.pp == 1 else 4))
    chosen = {CONFIG_KEYS[name]: value for name, value in values.items()}
    return {"Distributed.dp_degree": plan.dp, **chosen, "Global.micro_batch_size": micro}


def values_of(plan: ParallelPlan, corpus: Path, output_dir: Path, **more: Any) -> dict[str, Any]:
    """Overrides of a small run under ``plan``. ``more``: ``micro_batch_size``, and ``overrides``."""
    return {
        **SETTINGS,
        **plan_overrides(plan, more.get("micro_batch_size")),
        "Data.Train.dataset.input_dir": str(corpus),
        "Data.Eval.dataset.input_dir": str(corpus),
        "Engine.save_load.output_dir": str(output_dir),
        **more.get("overrides", {}),
    }


def run(
    pools: Pools, plan: ParallelPlan, corpus: Path, output_dir: Path, **more: Any
) -> list[tuple[int, float, float]]:
    """Train under ``plan``; (step, loss, gradient norm) of each step. ``more`` as for :func:`values_of`."""
    values = values_of(plan, corpus, output_dir, **more)
    pools(plan.world_size).run("tests.e2e.program:train", values=values, world=plan.world_size)
    return losses(output_dir)


def records(output_dir: Path, kind: str = "") -> list[dict[str, Any]]:
    """Complete records of metrics.jsonl, of one kind or of all; an unfinished last line is ignored."""
    path = output_dir / "metrics.jsonl"
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return [record for record in map(json.loads, lines) if kind in ("", record["kind"])]


def losses(output_dir: Path) -> list[tuple[int, float, float]]:
    """(step, loss, gradient norm) of every recorded step."""
    return [(r["step"], r["loss"], r["grad_norm"]) for r in records(output_dir, "train")]


def train(values: Mapping[str, Any], world: int, fault: str = "") -> str:
    """In a rank: what tools/train.py does, but for starting Paddle.

    Args:
        values: overrides by dotted key.
        world: number of ranks.
        fault: ``one_bit`` or ``nan`` in a weight of the last rank, ``bad_evaluation`` on this rank from the
            second evaluation on, ``same_data_rank`` for all ranks.

    Returns:
        The user's error the program ended with, or "".
    """
    import paddle

    from ppfleetx.commands.train import train
    from ppfleetx.config.loader import load_config
    from ppfleetx.distributed.init import init_distributed

    cfg = load_config(NANO, [f"{key}={value}" for key, value in values.items()], world_size=world)

    def run() -> None:
        with paddle.utils.unique_name.guard(), _fault(fault):
            train(cfg, init_distributed(cfg))

    if fault:
        return error_of(run)
    run()
    return ""


def error_of(call: Callable[..., object], *arguments: Any) -> str:
    """The user's error that a call ends with; "": none."""
    from ppfleetx.config.errors import UserError

    try:
        call(*arguments)
    except UserError as error:
        return str(error)
    return ""


@contextmanager
def _fault(name: str) -> Iterator[None]:
    """The program with a fault in it."""
    from ppfleetx.commands import train as build
    from ppfleetx.core.engine.engine import Engine

    read, build_dataloader = Engine._read, build.build_dataloader

    def reading(value: float) -> Callable[..., Any]:
        return lambda engine, batches: _spoil(engine, value) or read(engine, batches)

    def of_rank_0(cfg: Any, mode: str, **options: Any) -> Any:
        return build_dataloader(cfg, mode, **{**options, "data_rank": 0})

    owner, attribute, changed = {
        "": (build, "build_dataloader", build_dataloader),
        "same_data_rank": (build, "build_dataloader", of_rank_0),
        "bad_evaluation": (build, "build_dataloader", _with_a_bad_evaluation(build_dataloader)),
        "one_bit": (Engine, "_read", reading(1.5)),
        "nan": (Engine, "_read", reading(float("nan"))),
    }[name]
    with mock.patch.object(owner, attribute, changed):
        yield


def _with_a_bad_evaluation(build: Callable[..., Any]) -> Callable[..., Any]:
    def changed(cfg: Any, mode: str, **options: Any) -> Any:
        loader, evaluations = build(cfg, mode, **options), count()
        load = loader._load

        def refusing(micro_batches: Any) -> Any:
            if next(evaluations) >= loader.sampler.num_steps:
                raise DataError("a document holds id 99999")
            return load(micro_batches)

        if mode == "Eval" and options["data_rank"] == options["data_size"] - 1:
            loader._load = refusing
        return loader

    return changed


def _spoil(engine: Any, value: float) -> None:
    """Before step 2 put ``value`` into a gain of the last norm, on the last rank only."""
    if engine.state.step == 1 and engine.ctx.rank == engine.ctx.world_size - 1:
        parameter = dict(engine.runner.named_parameters())["decoder.final_norm.weight"]
        array = parameter.numpy()
        array[0] = value
        parameter.set_value(array)
