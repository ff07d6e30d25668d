"""Golden counts of device waits and kernel launches in a step. They may only fall."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.helpers.ranks import Pools
from tests.operators.options import DROPOUT
from tests.operators.scenarios import CASES

FILE = Path(__file__).with_name("counts.json")
LOW = {
    f"Engine.mix_precision.{key}": v for key, v in (("enable", True), ("dtype", "float16"), ("level", "O2"))
}
# Rows of a step: plan, and options.
STEPS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "one": ({}, {}),
    "one, float16 O2": ({}, LOW),
    "dp 2": ({"dp": 2}, {}),
    "mp 2": ({"mp": 2}, {}),
    "pp 2": ({"pp": 2}, {}),
    "sharding 2, stage 2": ({"sharding": 2, "sharding_stage": 2}, {}),
    "sharding 2, stage 3": ({"sharding": 2, "sharding_stage": 3}, {}),
    "sep 2": ({"sep": 2}, {}),
    "dp 2, float16 O2": ({"dp": 2}, LOW),
}
BLOCKS: dict[str, tuple[str, dict[str, Any]]] = {
    f"{model}{', dropout' if options else ''}": (model, options)
    for model in ("gpt", "llama")
    for options in ({}, DROPOUT)
}
KINDS = ("reads", "copies", "queued copies", "collectives")
Counts = dict[str, dict[str, dict[str, int]]]


def measure(pools: Pools, timeout: float = 60.0) -> Counts:
    """Counts of steps with eight layers (the largest of the ranks), kernels of one block, and kernels outside
    blocks."""
    steps = {name: step(pools, name, timeout) for name in STEPS}
    launches = {}
    for name in BLOCKS:
        launches |= block(pools, name, timeout)
    return {"steps": steps, "launches": launches}


def step(pools: Pools, name: str, timeout: float = 60.0) -> dict[str, int]:
    """One row of ``steps``."""
    plan, options = STEPS[name]
    world = 2 if plan else 1
    run = pools(world).run(CASES + "step_syncs", timeout=timeout, plan=plan, world_size=world, extra=options)
    return {kind: max(rank[kind] for rank in run) for kind in KINDS}


def block(pools: Pools, name: str, timeout: float = 60.0) -> dict[str, dict[str, int]]:
    """Two rows of ``launches``: a block's kernels, and the other kernels of a step."""
    model, options = BLOCKS[name]
    two, four = (
        pools(1).run(CASES + "step_launches", timeout=timeout, model=model, num_layers=layers, extra=options)[
            0
        ]
        for layers in (2, 4)
    )
    names = sorted({*two, *four})
    a_block = {kernel: (four.get(kernel, 0) - two.get(kernel, 0)) / 2 for kernel in names}
    rest = {kernel: two.get(kernel, 0) - 2 * a_block[kernel] for kernel in names}
    return {f"{name}: a block": _whole(a_block), f"{name}: the rest": _whole(rest)}


def _whole(counts: Mapping[str, float]) -> dict[str, int]:
    assert all(count == int(count) for count in counts.values()), counts
    return {kernel: int(count) for kernel, count in counts.items() if count} | {
        "all": int(sum(counts.values()))
    }


def read() -> Counts:
    return json.loads(FILE.read_text(encoding="utf-8"))


def write(counts: Counts) -> None:
    """Write one row a line."""
    parts = []
    for kind, rows in counts.items():
        lines = [f"  {json.dumps(name)}: {json.dumps(row)}" for name, row in rows.items()]
        parts.append(f' "{kind}": {{\n' + ",\n".join(lines) + "\n }")
    FILE.write_text("{\n" + ",\n".join(parts) + "\n}\n", encoding="utf-8")


def differences(row: str, found: Mapping[str, int], committed: Mapping[str, int]) -> tuple[list[str], bool]:
    """Messages about counts that have risen, and whether any has fallen. For launches only the sum is
    compared, because work may move from one kernel to another."""
    keys = ["all"] if "all" in committed else list(committed)
    risen = [
        f"{row}: {key} {found[key]}, were {committed[key]}" for key in keys if found[key] > committed[key]
    ]
    return risen, any(found[key] < committed[key] for key in keys)
