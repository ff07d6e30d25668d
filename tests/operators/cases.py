"""The recorded runs, called by name in the ranks of a pool (tests/helpers/ranks.py)."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np

from tests.operators.gpu_branches import GRADIENTS_OF, Named, gpu_branches
from tests.operators.host_syncs import HostSyncs
from tests.operators.kernel_log import VIEWS, KernelLog, kernel_of
from tests.parity.training import CONFIG, micro_batches, overrides

# Of programs: what is no kernel, and operands that decide the type where it is not the first.
_NO_KERNEL = ("data", "full_int_array", "if", "while")
_KEY_OPERAND = {"embedding": 1, "where": 1}
Change = Callable[[dict[str, Any]], dict[str, Any]]  # of a micro batch
BUCKET_BYTES = 64 << 20  # those of the product: the parity tests cut a small model into many


def _unchanged(batch: dict[str, Any]) -> dict[str, Any]:
    return batch


def step_syncs(plan: dict[str, Any], world_size: int, extra: dict[str, Any]) -> dict[str, int]:
    """Host synchronizations of the second step of a run, including the engine's exchange before it."""
    syncs, log = HostSyncs(), KernelLog()
    with _training(plan, world_size, "gpt", 4, extra) as (named, step):
        for number in range(2):
            before = named.queued
            with contextlib.ExitStack() as stack:
                if number == 1:
                    stack.enter_context(log.recording())
                    stack.enter_context(syncs.watching())
                step(number)
    syncs.add_kernels(log)
    return {**syncs.totals(), "queued copies": named.queued - before}


def each_wait() -> dict[str, list[int]]:
    """[reads, copies] counted for each way to make the host wait for its device."""
    import paddle

    x, host = paddle.ones([3]), np.zeros(3, np.float32)
    ways: dict[str, Callable[[], Any]] = {
        "item": lambda: x[0].item(),
        "float": lambda: float(x[0]),
        "truth": lambda: bool(x[0] > 0),
        "list": lambda: x.tolist(),
        "array": lambda: np.asarray(x),
        "to the host": lambda: x.cpu(),
        "to a place": lambda: x._copy_to(paddle.CPUPlace(), True),
        "by a mask": lambda: x[x > 0],
        "places": lambda: paddle.nonzero(x),
        "to_tensor": lambda: paddle.to_tensor([1.0]),
        "set_value": lambda: x.set_value(host),
        "nothing": lambda: x + 1.0,
    }
    found = {}
    for name, wait in ways.items():
        syncs, log = HostSyncs(), KernelLog()
        with log.recording(), syncs.watching():
            wait()
        syncs.add_kernels(log)
        found[name] = [syncs.totals()[kind] for kind in ("reads", "copies")]
    return found


def step_launches(model: str, num_layers: int, extra: dict[str, Any]) -> dict[str, int]:
    """Kernels that the second step of a run launches in one micro batch; views launch none."""
    log = KernelLog()
    extra = {"Model.num_layers": num_layers, **extra}
    with _training({}, 1, model, 16, extra) as (named, step):
        for number in range(2):
            before = named.calls["linear_v2", "float32"]
            with log.recording() if number == 1 else contextlib.nullcontext():
                step(number)
    launches = Counter({"copy of a strided tensor": log.copies})
    for (operator, _), count in log.calls.items():
        if (name := kernel_of(operator)) not in VIEWS:
            launches[name] += count
    # On a GPU a linear with a bias is one kernel, and its gradient another.
    biased = named.calls["linear_v2", "float32"] - before
    for end in ("", "_grad"):
        launches[f"linear_v2{end}"] += biased
        launches[f"matmul{end}"] -= biased
        launches[f"add{end}"] -= biased
    return {name: count for name, count in sorted(launches.items()) if count}


def kernels_of_training(
    plan: dict[str, Any],
    world_size: int,
    model: str,
    micro_batch_size: int,
    extra: dict[str, Any],
    documents: bool = False,
    sources: bool = False,
) -> list[list[str]]:
    """Kernels of two steps and an evaluation, by element type."""

    def with_sources(batch: dict[str, Any]) -> dict[str, Any]:
        return {**batch, "source_ids": np.arange(len(batch["tokens"])) % 2}

    log = KernelLog()
    change = with_sources if sources else _unchanged
    names = ("a", "b") if sources else ()
    run = _training(plan, world_size, model, micro_batch_size, extra, documents, change, sources=names)
    with run as (named, step), log.recording():
        step(0)
        step(1)
        step.runner.eval_step(step.batch(2))
    return _found(log, named)


def kernels_of_evaluation(
    plan: dict[str, Any], world_size: int, model: str, micro_batch_size: int, extra: dict[str, Any]
) -> list[list[str]]:
    """Kernels of a batch of an offline evaluation."""
    log = KernelLog()
    run = _training(plan, world_size, model, micro_batch_size, extra, trains=False)
    with run as (named, step), log.recording():
        step.runner.eval_step(step.batch(0)[:1])
    return _found(log, named)


def kernels_of_generation(directory: str, plan: list[str], world: int, dtype: str) -> list[list[str]]:
    """Kernels of generation by every strategy from the run in ``directory``."""
    from tests.generation.program import generate_each
    from tests.operators.scenarios import GENERATIONS

    low = [f"Engine.mix_precision.{key}" for key in ("enable=True", f"dtype={dtype}", "level=O2")]
    output = str(Path(directory) / f"{world}-{dtype}-")
    log, named = KernelLog(), Named()
    with gpu_branches(named, low=dtype != "float32"), log.recording():
        given = [*plan, *(low if dtype != "float32" else [])]
        generate_each(str(Path(directory) / "generation.yaml"), given, GENERATIONS, output, world)
    return _found(log, named)


def kernels_of_finetuning(
    plan: dict[str, Any], world_size: int, micro_batch_size: int, extra: dict[str, Any], task: str
) -> list[list[str]]:
    """Kernels of two steps and of the predictions of a GLUE task."""

    def labelled(batch: dict[str, Any]) -> dict[str, Any]:
        rows = len(batch["tokens"])
        labels = np.arange(rows) % 2
        one = {"labels": labels if extra["Model.num_classes"] > 1 else labels.astype(np.float32)}
        ends = np.full(rows, batch["tokens"].shape[1] // 2)
        return {**batch, **one, "loss_mask": np.ones(rows, np.float32), "lengths": ends}

    log, data = KernelLog(), {}
    for mode, split in (("Train", "train"), ("Eval", "dev")):
        values = {"name": task, "split": split, "input_dir": "none"}
        data |= {f"Data.{mode}.dataset.{key}": value for key, value in values.items()}
    run = _training(plan, world_size, "gpt", micro_batch_size, {**extra, **data}, change=labelled)
    with run as (named, step), log.recording():
        step(0)
        step(1)
        step.runner.compute(step.module.forward, step.batch(2)[:1])
    return _found(log, named)


def kernels_of_export(path: str) -> list[list[str]]:
    """Operators of an exported program, by the type of their first tensor. The program does not run."""
    import paddle

    program = paddle.jit.load(path).program()
    return sorted({(kernel_of(name.removeprefix("pd_op.")), dtype) for name, dtype in _operators(program)})


class _Step:
    """Takes steps of a runner like the engine."""

    def __init__(
        self, cfg: Any, ctx: Any, module: Any, documents: bool, change: Change, *, trains: bool
    ) -> None:
        from ppfleetx.core.engine.rank_consistency import RankConsistency
        from ppfleetx.parallel.parallelize import parallelize

        self.module, self.runner = module, parallelize(module, cfg, ctx, train=trains)
        self._cfg, self._ctx, self._documents, self._change = cfg, ctx, documents, change
        self._watch, self._stop = (
            RankConsistency(cfg, ctx, 1e9, self.runner.count),
            SimpleNamespace(signal_name=None, agree=bool),
        )

    def batch(self, number: int) -> list[dict[str, Any]]:
        return [self._change(batch) for batch in micro_batches(number, self._cfg, self._ctx, self._documents)]

    def __call__(self, number: int) -> None:
        batch = self.batch(number)
        self._watch.before_step(batch, None, self._stop, number)
        counts = self._watch.counts
        self.runner.train_step(batch, step=number + 1, lr=1e-3, weight_decay=0.1, counts=counts)


@contextlib.contextmanager
def _training(
    plan: dict[str, Any],
    world_size: int,
    model: str,
    micro_batch_size: int,
    extra: dict[str, Any],
    documents: bool = False,
    change: Change = _unchanged,
    trains: bool = True,
    sources: tuple[str, ...] = (),
) -> Iterator[tuple[Named, _Step]]:
    """Build a training run that takes the branches of a GPU."""
    import paddle

    from ppfleetx.config.loader import load_config
    from ppfleetx.core.module.build import build_module
    from ppfleetx.distributed import collectives
    from ppfleetx.distributed.cpu import backend as cpu_backend
    from ppfleetx.distributed.init import init_distributed
    from ppfleetx.parallel import sharding

    cpu_backend.install()
    given = {"Distributed.bucket_size": BUCKET_BYTES >> 20, **extra}
    values = overrides(plan, model, "adamw", micro_batch_size, given)
    cfg, named = load_config(CONFIG, values, world_size=world_size), Named()
    low = cfg.Engine.mix_precision.enable
    with contextlib.ExitStack() as stack:
        for module in (collectives, sharding):
            stack.enter_context(mock.patch.object(module, "BUCKET_BYTES", BUCKET_BYTES))
        stack.enter_context(paddle.utils.unique_name.guard())
        ctx = init_distributed(cfg)
        stack.enter_context(gpu_branches(named, low=low))
        yield named, _Step(cfg, ctx, build_module(cfg, sources), documents, change, trains=trains)


def _found(log: KernelLog, named: Named) -> list[list[str]]:
    """All (kernel, element type) pairs seen, and the gradients of the operators that stand-ins replace."""
    logged = {(kernel_of(operator), dtype) for operator, dtype in log.calls}
    told = {(kernel_of(operator), dtype) for operator, dtype in named.calls}
    backward = {name for name, _ in logged if name.endswith("_grad")}
    trained = bool(backward)
    for name, dtype in list(told):
        gradient = f"{name}_grad"
        if gradient in backward or (trained and name in GRADIENTS_OF):
            told.add((gradient, dtype))
    return sorted(map(list, logged | told))


def _operators(program: Any) -> Iterator[tuple[str, str]]:
    blocks = [program.global_block()]
    while blocks:
        for operator in blocks.pop().ops:
            blocks.extend(operator.blocks())
            name = operator.name().removeprefix("pd_op.")
            if name == operator.name() or name in _NO_KERNEL:
                continue
            values = [*operator.operands_source(), *operator.results()][_KEY_OPERAND.get(name, 0) :]
            types = [str(one.dtype) for one in values if one.initialized() and one.is_dense_tensor_type()]
            if types:
                yield name, types[0].rsplit(".", 1)[-1].lower()
