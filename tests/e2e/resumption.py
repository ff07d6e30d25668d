"""Checkpoints belong to the model: six steps under plan A with a checkpoint after three, the last three
again under plan B, compared with six steps of one process (in the test suite: four, two and two,
with half as many layers).

``make parity`` runs all pairs: ``python -m tests.e2e.resumption``. Some of them are in the test suite.
"""

from __future__ import annotations

import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from ppfleetx.config.parallel_plan import ParallelPlan as Plan
from ppfleetx.data.indexed_dataset import IndexedDatasetWriter
from tests.e2e.program import losses, run
from tests.helpers.ranks import Pools, RanksFailedError

TOLERANCE = 1e-5
ONE = Plan()
SOME: list[tuple[Plan, Plan]] = [
    (ONE, Plan(mp=2, pp=2)),
    (Plan(mp=2, pp=2), ONE),
    (Plan(dp=2), Plan(sharding=2)),
    (Plan(sharding=2, sharding_stage=3), Plan(dp=2)),
    (Plan(mp=4), Plan(dp=2, mp=2)),
    (Plan(pp=4), Plan(pp=2, virtual_pp_degree=2)),
    (Plan(mp=2, sequence_parallel=True), Plan(sep=2)),
]
ALL: list[tuple[Plan, Plan]] = [
    *SOME,
    (Plan(dp=2), Plan(sharding=2, sharding_stage=2)),
    (Plan(dp=2), Plan(sharding=2, sharding_stage=3)),
    (Plan(sharding=2), Plan(dp=2)),
    (Plan(sharding=2, sharding_stage=2), Plan(dp=2)),
    (Plan(sharding=2, sharding_stage=2), Plan(sharding=4, sharding_stage=3)),
    (Plan(dp=2, mp=2), Plan(mp=4)),
    (Plan(pp=4), Plan(pp=2)),
    (Plan(pp=4), Plan(pp=4, virtual_pp_degree=2)),
    (Plan(pp=2, virtual_pp_degree=2), Plan(pp=4)),
    (Plan(pp=2, virtual_pp_degree=2), Plan(mp=2, pp=2, virtual_pp_degree=2)),
    (Plan(pp=4, virtual_pp_degree=2), Plan(pp=2, pp_layers=(3, 5))),
    (Plan(pp=2, mp=2), Plan(pp=2, dp=2)),
    (Plan(mp=2, sequence_parallel=True), Plan(mp=2)),
    (Plan(mp=2), Plan(mp=4, sequence_parallel=True)),
    (Plan(sep=2), ONE),
    (Plan(dp=2, mp=2, pp=2), Plan(sharding=2, mp=2)),
    (Plan(sharding=2, mp=2), Plan(dp=2, mp=2, pp=2)),
    (Plan(sharding=2, sharding_stage=3, pp=2), Plan(mp=2, sequence_parallel=True, pp=2)),
    (Plan(dp=4), Plan(dp=2)),
    (Plan(sharding=2, sharding_stage=2, sharding_offload=True), Plan(sharding=2, sharding_stage=3)),
    (Plan(pp=2), Plan(sharding=2, sharding_stage=3, sharding_offload=True, mp=2)),
]


def write_corpus(prefix: Path) -> None:
    """Write documents with a learnable next token."""
    rng = np.random.default_rng(0)
    with IndexedDatasetWriter(prefix, np.uint16) as writer:
        for _ in range(200):
            start, step, length = rng.integers(0, 509), rng.integers(1, 4), rng.integers(20, 120)
            writer.add_document(np.append((start + step * np.arange(length)) % 509, 511), [length + 1])


@dataclass
class Resumption:
    """Runs pairs of plans; runs of the first plan of a pair are kept for other pairs.

    Args:
        steps: of a whole run; the checkpoint is made after half of them.
        num_layers: of the model.
    """

    pools: Pools
    directory: Path
    corpus: Path
    steps: int = 6
    num_layers: int = 8
    _saved: dict[tuple[Plan, int | None], Path] = field(default_factory=dict)

    def difference(self, before: Plan, after: Plan, micro_batch_sizes: tuple[int | None, ...] = (None, None)):
        """Largest relative difference of a loss or gradient norm from one process, before and after."""
        expected = losses(self.saved(ONE, None))
        source = self.saved(before, micro_batch_sizes[0])
        target = self.directory / f"resumed{len(list(self.directory.iterdir()))}"
        half = self.steps // 2
        ckpt_dir = {"Engine.save_load.ckpt_dir": str(source / f"epoch_0_step_{half}")}
        options = {"overrides": ckpt_dir | self._sizes(), "micro_batch_size": micro_batch_sizes[1]}
        resumed = run(self.pools, after, self.corpus, target, **options)
        assert [step for step, *_ in resumed] == list(range(half + 1, self.steps + 1))
        return max(_difference(losses(source), expected), _difference(resumed, expected[half:]))

    def saved(self, plan: Plan, micro_batch_size: int | None) -> Path:
        """Output directory of a whole run under ``plan``, with a checkpoint after half of it."""
        key = (plan, micro_batch_size)
        if key not in self._saved:
            output_dir = self._saved[key] = self.directory / f"saved{len(self._saved)}"
            options = {"overrides": self._sizes(), "micro_batch_size": micro_batch_size}
            run(self.pools, plan, self.corpus, output_dir, **options)
        return self._saved[key]

    def _sizes(self) -> dict[str, int]:
        return {
            "Engine.max_steps": self.steps,
            "Engine.save_load.save_steps": self.steps // 2,
            "Model.num_layers": self.num_layers,
        }


def _difference(values, expected) -> float:
    pairs = zip(values, expected, strict=True)
    return max(abs(a - b) / abs(b) for one, other in pairs for a, b in zip(one, other, strict=True))


def main() -> int:
    failed = 0
    with tempfile.TemporaryDirectory() as name, Pools() as pools:
        write_corpus(Path(name) / "toy")
        (Path(name) / "runs").mkdir()
        resumption = Resumption(pools, Path(name) / "runs", Path(name) / "toy")
        for before, after in ALL:
            started = time.monotonic()
            try:
                worst = resumption.difference(before, after)
            except (RanksFailedError, AssertionError) as error:
                print(error)
                worst = float("nan")
            passed = worst <= TOLERANCE
            failed += not passed
            took = time.monotonic() - started
            verdict = "passed" if passed else "FAILED"
            print(f"{verdict} {before} -> {after}: {worst:.1e} ({took:.1f} s)", flush=True)
    print(f"{len(ALL) - failed} of {len(ALL)} pairs of plans continue as one card does")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
