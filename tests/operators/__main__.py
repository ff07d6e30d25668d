"""Record what runs on a GPU, and write the committed table and counts: ``make operators``.

``python -m tests.operators table`` runs every plan of one and two processes (``--sizes 1 2 4`` more) in every
precision, generation, finetuning and export, and adds what is new to ``ppfleetx/utils/gpu_operators.json``;
``--part 1/4`` runs a quarter. ``python -m tests.operators counts`` writes ``tests/operators/counts.json``.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from ppfleetx.utils.gpu_operators import used_kernels
from tests.helpers.ranks import Pools
from tests.operators import counts, table
from tests.operators.scenarios import CASES, Scenario, everything

TIMEOUT = 600.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=["table", "counts"])
    parser.add_argument("--sizes", nargs="+", type=int, default=[1, 2], help="processes of the plans")
    parser.add_argument("--part", default="1/1", help="one of so many parts of the scenarios")
    parser.add_argument("--gpu-registry", type=Path, help="JSON {kernel: [element type]} of a GPU build")
    arguments = parser.parse_args()
    pools = Pools()
    try:
        if arguments.what == "counts":
            counts.write(counts.measure(pools, timeout=TIMEOUT))
            return 0
        number, parts = map(int, arguments.part.split("/"))
        failed: list[str] = []
        scenarios = list(everything(tuple(arguments.sizes)))[number - 1 :: parts]
        with tempfile.TemporaryDirectory() as directory:
            found = set(_record(pools, scenarios, Path(directory), failed))
            if number == 1:
                found |= set(table.exported(pools, Path(directory), TIMEOUT))
    finally:
        pools.close()
    return table.write(found | table.named(), arguments.gpu_registry) or bool(failed)


def _record(
    pools: Pools, scenarios: list[Scenario], directory: Path, failed: list[str]
) -> Iterator[table.Used]:
    """What the scenarios run; the names of those that end with an error are added to ``failed``."""
    known = {(name, dtype) for name, kernel in used_kernels().items() for dtype in kernel.used}
    runs = table.write_runs(directory)
    for number, scenario in enumerate(scenarios, 1):
        started = time.monotonic()
        pool, arguments = pools(scenario.world), table.arguments_of(scenario, runs)
        outcomes = pool.call(CASES + scenario.case, timeout=TIMEOUT, **arguments)
        errors = [outcome.error or "died" for outcome in outcomes if outcome.error or outcome.died]
        if errors:
            print(f"FAILED {scenario.name}: {errors[0]}", flush=True)
            failed.append(scenario.name)
            continue
        seen = {(name, dtype) for outcome in outcomes for name, dtype in outcome.value}
        new = ", ".join(f"{name} {dtype}" for name, dtype in sorted(seen - known))
        took = time.monotonic() - started
        print(
            f"{number}/{len(scenarios)} {scenario.name} ({took:.1f} s){': ' + new if new else ''}", flush=True
        )
        known |= seen
        yield from seen


if __name__ == "__main__":
    sys.exit(main())
