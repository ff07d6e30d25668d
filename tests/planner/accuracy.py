"""How far off the planner is: ``make planner-accuracy`` runs everything and writes the table of the docs.

Memory and communication are compared with CPU ranks on this machine, times with published runs.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from ppfleetx.config.parallel_plan import AXES
from tests.device.place import place
from tests.e2e.resumption import write_corpus
from tests.helpers.ranks import Pools
from tests.planner.machine import (
    Compared,
    compare_device_memory,
    compare_memory,
    compare_traffic,
    memory_environment,
)
from tests.planner.plans import (
    DEVICE_PLANS,
    MEMORY_PLANS,
    SHORT_DEVICE_PLANS,
    TRAFFIC_PLANS,
    device_plan_name,
)
from tests.planner.published import (
    MEGATRON_AXES,
    MIXTURES,
    TIMES,
    PublishedMemory,
    ascend_error,
    bloom_memory,
    bloom_sweep_errors,
    fleetx_memory,
    mpt_errors,
    nanotron_memory,
    regret,
    time_errors,
)

PAGE = Path(__file__).resolve().parents[2] / "docs" / "planner.md"
BEGIN, END = "<!-- accuracy: made by make planner-accuracy -->", "<!-- end of accuracy -->"


def main() -> None:
    rows = [*_machine_rows(), *published_rows()]
    table = ["| compared with | rows | median error | largest |", "|---|---|---|---|", *rows]
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    _, _, after = rest.partition(END)
    PAGE.write_text(f"{before}{BEGIN}\n" + "\n".join(table) + f"\n{END}{after}", encoding="utf-8")
    print("\n".join(table))


def _machine_rows() -> Iterable[str]:
    pools = Pools()
    memory: list[Compared] = []
    traffic: list[Compared] = []
    try:
        for family in ("gpt", "llama"):
            for plan in MEMORY_PLANS:
                found = compare_memory(pools, plan, family)
                print(family, plan, *(f"{row.what} {row.error:+.2%}" for row in found), sep="  ", flush=True)
                memory += found
            for plan in TRAFFIC_PLANS:
                found = compare_traffic(pools, plan, family)
                print(family, plan, *(f"{row.what} {row.error:+.2%}" for row in found), sep="  ", flush=True)
                traffic += found
    finally:
        pools.close()
    yield from _device_rows()
    parts = [row.error for row in memory if not row.what.startswith("peak")]
    peaks = [row.error for row in memory if row.what.startswith("peak")]
    plans = f"this machine, {len(MEMORY_PLANS)} plans of two families"
    yield _row(f"{plans}: parameters, gradients, states and start of each stage", parts)
    yield _row(f"{plans}: peak of each stage", peaks)
    words = f"this machine, {len(TRAFFIC_PLANS)} plans of two families: bytes sent in a step, by axis"
    yield _row(words, [row.error for row in traffic])


def _device_rows() -> Iterable[str]:
    """Of the reference device."""
    here, found = place(), []
    if here.obstacle:
        return
    pools = Pools(device=here.device, most_calls=12, **memory_environment())
    plans = (*SHORT_DEVICE_PLANS, *DEVICE_PLANS)
    try:
        with tempfile.TemporaryDirectory() as directory:
            corpus = Path(directory) / "toy"
            write_corpus(corpus)
            for number, plan in enumerate(plans):
                output = Path(directory) / f"run{number}"
                rows = compare_device_memory(pools, plan, here.device, corpus, output, is_reference=True)
                print(device_plan_name(*plan), *(f"{row.what} {row.error:+.2%}" for row in rows), flush=True)
                found += rows
    finally:
        pools.close()
    for what, words in (("start", "before the first step"), ("step", "in a step"), ("save", "in a save")):
        errors = [row.error for row in found if row.what.startswith(what)]
        yield _row(f"the reference device, {len(plans)} plans: peak of each stage {words}", errors)


def published_rows() -> Iterable[str]:
    """Rows of the table that need no ranks."""
    for published in TIMES:
        yield _row(published.words, time_errors(published))
    vtrain = next(published for published in TIMES if published.held_out)
    for axes, whose in ((MEGATRON_AXES, "Megatron-LM"), (AXES, "this engine")):
        words = f"the plan ranked first against the best measured, vTrain's four models, ranks as {whose}"
        yield _row(words, list(regret(replace(vtrain, axes=axes)).values()))
    yield _row("step time: BLOOM's batch sweep, machine calibrated on its other plans", bloom_sweep_errors())
    for card in ("A100-80GB", "H100-80GB"):
        yield _row(
            f"step time: MPT with fused attention on a node of {card}, rows not fitted", mpt_errors(card)
        )
    yield _row("step time: MindSpeed-Core-MS' 39B on 128 Ascend 910B, not fitted", [ascend_error()])
    yield _row(
        "step time: mixtures of experts on 64 and 128 H100s, not fitted", [one.error for one in MIXTURES]
    )
    yield _row("memory: BLOOM's trials on A100s, rows not fitted", _judged(bloom_memory()))
    yield _row("memory: nanotron's plans on H100s, rows not fitted", _judged(nanotron_memory()))
    yield _row("memory: PaddleFleetX's 345M and 1.3B on a V100", [row.error for row in fleetx_memory()])


def _judged(rows: list[PublishedMemory]) -> list[float]:
    return [row.error for row in rows if row.measured is not None and not row.fitted]


def _row(words: str, errors: list[float]) -> str:
    sizes = sorted(errors, key=abs)
    median, largest = abs(sizes[len(sizes) // 2]), sizes[-1]
    return f"| {words} | {len(errors)} | {median:.1%} | {largest:+.1%} |"


if __name__ == "__main__":
    main()
