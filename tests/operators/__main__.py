"""Record the kernels a GPU runs, and write the committed table and counts: ``make operators``.

``python -m tests.operators table`` runs the scenarios of tests/operators/scenarios.py with one and two
processes (``--sizes 1 2 4``: also four) and adds new kernels to ``ppfleetx/utils/gpu_operators.json``.
``--part 1/4`` runs a quarter of them, ``-k TEXT`` those whose names contain it. ``python -m tests.operators
counts`` writes ``tests/operators/counts.json``.
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
from tests.operators.scenarios import CASES, Scenario, everything, small_styles

TIMEOUT = 600.0
COMM_TIMEOUT = "30"  # seconds that ranks wait for one that has failed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=["table", "counts"])
    parser.add_argument("--sizes", nargs="+", type=int, default=[1, 2], help="processes of the runs: 1, 2, 4")
    parser.add_argument("--part", default="1/1", help="one of so many parts of the runs")
    parser.add_argument("-k", "--keyword", default="", help="only runs whose name contains this")
    for device in table.DEVICES:
        parser.add_argument(
            f"--{device}-registry", type=Path, help="JSON {kernel: [element type]} of a build"
        )
    arguments = parser.parse_args()
    pools = Pools()
    try:
        if arguments.what == "counts":
            counts.write(counts.measure(pools, timeout=TIMEOUT))
            return 0
        number, parts = map(int, arguments.part.split("/"))
        scenarios = [one for one in everything(tuple(arguments.sizes)) if arguments.keyword in one.name]
        with_export = number == 1 and not arguments.keyword
        registries = {device: getattr(arguments, f"{device}_registry") for device in table.DEVICES}
        return _record_all(pools, scenarios[number - 1 :: parts], with_export, registries)
    finally:
        pools.close()


def _record_all(
    pools: Pools, scenarios: list[Scenario], with_export: bool, registries: dict[str, Path | None]
) -> int:
    """Write the table after each scenario with new kernels, so that an interrupted run loses nothing."""
    failed: list[str] = []
    found, missing = table.named(), table.write(table.named(), registries)
    with tempfile.TemporaryDirectory() as directory:
        for seen in _record(pools, scenarios, Path(directory), failed):
            if not seen <= found:
                found |= seen
                missing = table.write(found, registries)
        if with_export:
            missing = table.write(found | table.exported(pools, Path(directory), TIMEOUT), registries)
    for name in failed:
        print(f"not recorded: {name}")
    for one in missing:
        print(f"not known to be registered for GPUs, and not written: {one}")
    return 1 if failed or missing else 0


def _record(
    pools: Pools, scenarios: list[Scenario], directory: Path, failed: list[str]
) -> Iterator[set[table.Used]]:
    """Yield the kernels of each scenario; append the names of failed scenarios to ``failed``."""
    known = {(name, dtype) for name, kernel in used_kernels().items() for dtype in kernel.used}
    wanted = {scenario.arguments.get("directory") for scenario in scenarios}
    runs = table.write_runs(directory, [name for name in small_styles() if name in wanted])
    for number, scenario in enumerate(scenarios, 1):
        started = time.monotonic()
        pool = pools(scenario.world, PADDLE_CPU_COMM_TIMEOUT=COMM_TIMEOUT)
        arguments = table.arguments_of(scenario, runs)
        outcomes = pool.call(CASES + scenario.case, timeout=TIMEOUT, **arguments)
        errors = [outcome.error or "died" for outcome in outcomes if outcome.error or outcome.died]
        errors.sort(key=lambda error: error.startswith("CommTimeoutError"))  # the others only waited
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
        yield seen


if __name__ == "__main__":
    sys.exit(main())
