"""Run a plan in a pool of ranks and compare it with the run of one process."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ppfleetx.config.parallel_plan import ParallelPlan
from tests.helpers.ranks import Pools
from tests.parity.training import GLOBAL_BATCH, STEPS

TRAIN = "tests.parity.training:train"
TRAIN_PART = "tests.parity.training:train_part"
TOLERANCE = 1e-5
BFLOAT16_TOLERANCE = 2e-2
"""Of runs whose products round their operands to bfloat16: sums in another order move some operands to the
next number, which is up to 0.8 % away."""
IN_BFLOAT16 = {"Engine.mix_precision.enable": True, "Engine.mix_precision.dtype": "bfloat16"}


def micro_batch_size_of(plan: ParallelPlan) -> int:
    """Two or more micro batches, four with a pipeline, a multiple of the stages with virtual stages."""
    local = GLOBAL_BATCH // plan.data_size
    wanted = 2 if plan.pp == 1 else 4
    if plan.virtual_pp_degree > 1:
        wanted = plan.pp
    return max(1, local // wanted)


@dataclass
class Difference:
    """Largest relative differences from one card; ``first`` must be exactly 0."""

    loss: float
    grad_norm: float
    metrics: float
    first: float
    last: float

    @property
    def worst(self) -> float:
        return max(self.loss, self.grad_norm, self.metrics, self.last)

    def __str__(self) -> str:
        return ", ".join(f"{name} {value:.1e}" for name, value in asdict(self).items())


class Comparison:
    """Runs plans and compares them with runs of one process, which are cached.

    Args:
        pools: where ranks come from.
        directory: for the weights of the runs of one process.
        short: three steps instead of five; ``make parity`` runs all of them.
        train: what the ranks run, ``tests.parity.training:train`` or something that calls it, unless a run
            names another one.

    The model has eight layers, or four where that leaves every part of a pipeline two: what a plan does is
    the same in each layer.
    """

    def __init__(self, pools: Pools, directory: Path, *, short: bool = False, train: str = TRAIN) -> None:
        self.pools, self._directory, self._references = pools, directory, {}
        self._short, self._train, self._parts = short, train, {}

    def run(
        self,
        plan: ParallelPlan,
        model: str = "gpt",
        optimizer: str = "adamw",
        *,
        micro_batch_size: int = 0,
        reference_micro_batch_size: int = 8,
        of_plan: Mapping[str, Any] | None = None,
        train: str = "",
        **more: Any,
    ) -> Difference:
        """Differences of the plan's run from the run of one process with the same options ``more``; overrides
        ``of_plan`` are for the plan alone."""
        more = {
            "steps": 3 if self._short else STEPS,
            **more,
            "extra": _layers(plan) | (more.get("extra") or {}),
        }
        reference, directory = self.reference(model, optimizer, reference_micro_batch_size, train, **more)
        more["extra"] = {**more["extra"], **(of_plan or {})}
        results = self.run_plan(plan, model, optimizer, micro_batch_size, directory, train, **more)
        for key in ("loss", "grad_norm", "metrics", "tokens"):
            assert all(result[key] == results[0][key] for result in results), f"{key} differs between ranks"
        assert results[0]["tokens"] == reference["tokens"]
        return Difference(
            loss=apart(results[0]["loss"], reference["loss"]),
            grad_norm=apart(results[0]["grad_norm"], reference["grad_norm"]),
            metrics=apart(results[0]["metrics"], reference["metrics"]),
            first=max(result["first_weights"] for result in results),
            # AdamW makes a whole step of a gradient that is nearly zero: its weights are not compared.
            last=max(result["last_weights"] for result in results) if optimizer == "sgd" else 0.0,
        )

    def check(self, plan: ParallelPlan, model: str = "gpt", optimizer: str = "sgd", **more: Any) -> None:
        """Assert that the plan begins with the weights of one card and trains as it does."""
        found = self.run(plan, model, optimizer, **more)
        assert found.first == 0, "initial weights differ"
        assert found.worst <= TOLERANCE, str(found)

    def run_plan(
        self,
        plan: ParallelPlan,
        model: str,
        optimizer: str,
        micro_batch_size: int = 0,
        weights_dir: str | None = None,
        train: str = "",
        **more: Any,
    ) -> list[dict[str, Any]]:
        """Results of the plan's run, by rank."""
        return self.pools.run(
            plan,
            train or self._train,
            model=model,
            optimizer=optimizer,
            micro_batch_size=micro_batch_size or micro_batch_size_of(plan),
            weights_dir=weights_dir,
            **more,
        )

    def train_part(
        self,
        plan: ParallelPlan,
        first: int,
        end: int,
        *,
        load_from: str | None = None,
        save_to: str | None = None,
        train: str = TRAIN_PART,
        model: str = "gpt",
        **more: Any,
    ) -> list[float]:
        """Losses and gradient norms of steps ``first`` to ``end``, on which all ranks agree. The run starts
        from the checkpoint ``load_from`` and saves to ``save_to``; without either, results are cached."""
        arguments = {"model": model, "first_step": first, "end_step": end, **more}
        key = str((plan, train, arguments))
        if load_from is None and save_to is None and key in self._parts:
            return self._parts[key]
        results = self.pools.run(
            plan,
            train,
            micro_batch_size=micro_batch_size_of(plan),
            load_from=load_from,
            save_to=save_to,
            **arguments,
        )
        assert all(result == results[0] for result in results)
        if load_from is None and save_to is None:
            self._parts[key] = results[0]
        return results[0]

    def train_along(self, plans: Sequence[ParallelPlan], directory: Path, **more: Any) -> list[float]:
        """The numbers of :meth:`train_part`, two steps with each plan, which goes on from the one before."""
        numbers, checkpoint = [], None
        for index, plan in enumerate(plans):
            first, end = 2 * index, 2 * index + 2
            numbers += self.train_part(plan, first, end, load_from=checkpoint, save_to=str(directory), **more)
            checkpoint = str(directory / f"epoch_0_step_{end}")
        return numbers

    def reference(
        self, model: str, optimizer: str, micro_batch_size: int, train: str = "", **more: Any
    ) -> tuple[dict[str, Any], str]:
        """Result and weights' directory of the run of one process."""
        key = str((model, optimizer, micro_batch_size, train, more))
        if key not in self._references:
            directory = tempfile.mkdtemp(dir=self._directory)
            (result,) = self.run_plan(
                ParallelPlan(), model, optimizer, micro_batch_size, directory, train, **more
            )
            self._references[key] = (result, directory)
        return self._references[key]


def _layers(plan: ParallelPlan) -> dict[str, int]:
    """The override that makes the model as small as the plan allows."""
    four = plan.pp * plan.virtual_pp_degree <= 2 and plan.pp_layers is None
    return {"Model.num_layers": 4} if four else {}


def apart(values: Sequence[float], expected: Sequence[float]) -> float:
    """The largest relative difference; 0 of nothing."""
    return max((abs(v - e) / abs(e) for v, e in zip(values, expected, strict=True)), default=0.0)
