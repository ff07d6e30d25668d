"""Every pair of training options together: equal to one card, and both seen to take effect.

    python -m tests.parity.option_pairs                    # all pairs, in all types, with and without biases
    python -m tests.parity.option_pairs -k zb_h1 lora      # pairs of options whose names contain either word

An option is some keys of the configuration, the part of a plan that it needs, and its evidence: a function
of the program that is called where the option is in effect, and not otherwise. A pair that the configuration
refuses is listed with the refusal. ``tests/parity/test_option_pairs.py`` finds keys that no option has.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import pkgutil
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

from ppfleetx.config.errors import ConfigError
from ppfleetx.config.loader import load_config
from ppfleetx.config.parallel_plan import ParallelPlan as Plan
from tests.helpers.ranks import Pools, RanksFailedError, fields_of
from tests.parity import pruned, training
from tests.parity.comparison import TOLERANCE, apart, micro_batch_size_of

MIXED = "Engine.mix_precision."
TYPES = ("float32", "O1", "O2")
_STEPS, _MOST_RANKS = 2, 4
# Relative, of losses. Bfloat16 rounds where plans cut sums; a grid of 8 bits moves by whole steps then.
_TOLERANCES = {"float32": TOLERANCE, "O1": 1e-3, "O2": 1e-3}
_ON_A_GRID = 5e-3
TEACHER = "<teacher>"


@dataclass(frozen=True)
class Option:
    """One training option.

    Attributes:
        evidence: ``module:name`` of what is called where it is in effect, or a key of ``Matmul.uses``.
        keys: overrides.
        plan: fields of the plan that it needs.
        types: in which it means something.
        documents: the samples hold several documents.
        grid: weights lie on a grid: float64 is compared in the place of float32.
    """

    evidence: str
    keys: Mapping[str, Any] = field(default_factory=dict)
    plan: Mapping[str, Any] = field(default_factory=dict)
    types: Sequence[str] = TYPES
    documents: bool = False
    grid: bool = False


_SHARDED = {"sharding": 2}
EXPERTS = {
    "Model.moe": "{num_experts: 4, expert_ffn_size: 32, layers: [1, 3], router: {bias: True}, "
    "shared_experts: {ffn_size: 16}, bias_update_rate: 0.01, z_loss_weight: 0.01}"
}
OPTIONS: dict[str, Option] = {
    "main_gradients": Option("linear_grad_add", types=("O2",)),
    "weight_cast": Option("weight_cast", types=("O1",)),
    "zb_h1": Option("deferred", plan={"pp": 2, "pp_schedule": "zb_h1"}),
    "virtual_stages": Option(
        "ppfleetx.parallel.pipeline_schedules:interleave_two_stages", plan={"pp": 2, "virtual_pp_degree": 2}
    ),
    "mp_async_allreduce": Option("overlapped", {"Distributed.mp_async_allreduce": True}, {"mp": 2}),
    "sp_async_reduce_scatter": Option(
        "overlapped", {"Distributed.sp_async_reduce_scatter": True}, {"mp": 2, "sequence_parallel": True}
    ),
    "recompute_allgather": Option(
        "ppfleetx.nn.matmul:ScatteredInput.start_whole",
        {"Distributed.sp_async_reduce_scatter": True, "Distributed.recompute_allgather": True},
        {"mp": 2, "sequence_parallel": True},
    ),
    "sequence_parallel": Option(
        "paddle.distributed.fleet.utils.sequence_parallel_utils:ScatterOp.apply",
        plan={"mp": 2, "sequence_parallel": True},
    ),
    "overlap_p2p_comm": Option(
        "ppfleetx.parallel.pipeline_schedules:AsyncPipeline._forward",
        {"Distributed.overlap_p2p_comm": True},
        {"pp": 2},
    ),
    "sep": Option("ppfleetx.nn.context_parallel:exchange", plan={"sep": 2}),
    "sharding_1": Option(
        "ppfleetx.parallel.param_broadcast:ParamBroadcast.updated", plan={**_SHARDED, "sharding_stage": 1}
    ),
    "sharding_2": Option(
        "ppfleetx.parallel.sharding:Sharding._send_full", plan={**_SHARDED, "sharding_stage": 2}
    ),
    "sharding_3": Option(
        "ppfleetx.parallel.zero3:ParameterSharding._fetch", plan={**_SHARDED, "sharding_stage": 3}
    ),
    "offload": Option(
        "ppfleetx.optims.optimizer:copy_to_host",
        plan={**_SHARDED, "sharding_stage": 2, "sharding_offload": True},
    ),
    "no_overlap": Option(
        "ppfleetx.parallel.grad_sync:all_reduce_packed",
        {"Distributed.sharding.reduce_overlap": False, "Distributed.sharding.broadcast_overlap": False},
        {"dp": 2},
    ),
    "reduce_overlap": Option(
        "ppfleetx.parallel.grad_sync:GradientSync._bucket_sums",
        {"Distributed.sharding.reduce_overlap": True},
        {"dp": 2},
    ),
    "loss_chunks": Option("ppfleetx.nn.chunked_loss:_LossInPieces.apply", {"Model.loss_chunks": 3}),
    "recompute": Option(
        "ppfleetx.models.gpt.layers:recompute",
        {"Model.use_recompute": True, "Model.recompute_granularity": "full"},
    ),
    "recompute_core": Option(
        "ppfleetx.nn.attention:recompute",
        {"Model.use_recompute": True, "Model.recompute_granularity": "core_attn"},
    ),
    "lora": Option("ppfleetx.nn.lora:LoraBranch.forward", {"Model.lora.rank": 4}),
    "small_weights": Option(
        "ppfleetx.nn.quantized:QuantizedMatrix.linear", {"Model.lora.rank": 4, "Compress.Weights.bits": 8}
    ),
    "qat": Option(
        "ppfleetx.nn.fake_quant:FakeQuantizer.weight", {"Compress.Quantization.enable": True}, grid=True
    ),
    "pruning": Option(
        "ppfleetx.compress.prune_in_training:PruningInTraining._set_to_zero",
        {"Compress.Prune.enable": True, "Compress.Prune.ratio": 0.25},
    ),
    "distillation": Option(
        "ppfleetx.compress.distill:_Divergence.apply", {"Compress.Distill": f"{{teacher: {TEACHER}}}"}
    ),
    "experts": Option("ppfleetx.nn.matmul:Matmul.grouped", EXPERTS),
    "expert_parallel": Option("ppfleetx.nn.token_dispatcher:Route.depart", EXPERTS, {"dp": 2, "ep": 2}),
    "window": Option("ppfleetx.nn.attention:window_start", {"Model.attention_window": 5}),
    "layer_patterns": Option(
        "ppfleetx.nn.attention:window_start",
        {
            "Model.attention_window": 5,
            "Model.attention_window_layers": "[0, 2]",
            "Model.position_embedding_type": "rope",
            "Model.local_rotary_base": 100.0,
            "Model.rotary_layers": "[0, 1]",
        },
    ),
    "factors": Option(
        "ppfleetx.nn.attention_kernels:softcapped",
        {
            "Model.attn_logit_softcapping": 2.0,
            "Model.final_logit_softcapping": 5.0,
            "Model.embedding_multiplier": 2.0,
            "Model.residual_multiplier": 0.8,
            "Model.attention_multiplier": 0.3,
            "Model.logits_multiplier": 0.7,
        },
    ),
    "alibi": Option(
        "ppfleetx.nn.attention:Attention._with_biases",
        {
            "Model.position_embedding_type": "alibi",
            "Model.embedding_norm": True,
            "Model.parallel_residual": True,
            "Model.shared_input_norm": True,
        },
    ),
    "norms_of_all_heads": Option(
        "ppfleetx.nn.attention:Attention._normed",
        {
            "Model.normalization": "RMSNorm",
            "Model.qk_layernorm": "all_heads",
            "Model.sandwich_norm": True,
            "Model.pre_norm": False,
        },
    ),
    "documents": Option("ppfleetx.nn.masks:attention_mask", documents=True),
}
"""Training options by name."""


@dataclass(frozen=True)
class Pair:
    """Two options in one run.

    Attributes:
        names: of the options.
        dtype: one of :data:`TYPES`.
        bias: whether linears have biases.
    """

    names: tuple[str, str]
    dtype: str
    bias: bool

    def __str__(self) -> str:
        return f"{' x '.join(self.names)}, {self.dtype}, {'with' if self.bias else 'no'} biases"

    @property
    def options(self) -> list[Option]:
        return [OPTIONS[name] for name in self.names]

    @property
    def plan(self) -> Plan | None:
        """A plan that both need; None where they need different ones, or say different things of a key."""
        keys: dict[str, Any] = {}
        wanted: dict[str, Any] = {}
        for option in self.options:
            for found, more in ((keys, option.keys), (wanted, option.plan)):
                if any(found.get(key, value) != value for key, value in more.items()):
                    return None
                found |= more
        plan = Plan(**(wanted or {"dp": 2}))
        return plan if plan.world_size <= _MOST_RANKS else None

    def has(self, trait: str) -> bool:
        """Whether one of them has ``documents``, or ``grid``."""
        return any(getattr(option, trait) for option in self.options)

    def keys(self, teacher: str, *, one_card: bool) -> dict[str, Any]:
        """Overrides of the run, or of the one that it is compared with."""
        found: dict[str, Any] = {"Model.num_layers": 4, "Model.add_bias_linear": self.bias}
        for option in self.options:
            found |= option.keys
        if self.dtype != "float32":
            found |= {f"{MIXED}enable": True, f"{MIXED}dtype": "bfloat16", f"{MIXED}level": self.dtype}
        taken = [fused_ops for name, fused_ops in FUSED.items() if name in self.names]
        found["Model.fused_ops"] = f"[{','.join(taken)}]" if taken else "none"
        if one_card:
            found = {key: value for key, value in found.items() if not key.startswith("Distributed.")}
        return {
            key: value.replace(TEACHER, teacher) if isinstance(value, str) else value
            for key, value in found.items()
        }

    def refusal(self) -> str:
        """Why the configuration refuses it; "": it does not."""
        plan = self.plan
        given = training.overrides(
            fields_of(plan),
            "gpt",
            "sgd",
            micro_batch_size_of(plan),
            {**self.keys("checkpoint", one_card=False), "Engine.max_steps": 100},
        )
        try:
            load_config(training.CONFIG, given, world_size=plan.world_size)
        except ConfigError as error:
            return str(error)
        return ""


FUSED = {"main_gradients": "linear_grad_add", "weight_cast": "weight_cast"}


def pairs(words: Sequence[str] = ()) -> list[Pair]:
    """All pairs in all types, with and without biases; with ``words`` those that have one in a name."""
    return [
        pair
        for names in itertools.combinations(OPTIONS, 2)
        if not words or any(word in name for word in words for name in names)
        for dtype in TYPES
        if all(dtype in OPTIONS[name].types for name in names)
        for bias in (True, False)
        if (pair := Pair(names, dtype, bias)).plan is not None
    ]


# -- in the ranks


def train(
    plan: dict[str, Any],
    world_size: int,
    micro_batch_size: int,
    extra: dict[str, Any],
    evidence: list[str],
    dtype: str,
    documents: bool,
) -> dict[str, Any]:
    """Losses and gradient norms of a few steps, and how often each evidence was seen on this rank."""
    import paddle

    from tests.helpers.low_precision import emulated

    seen: Counter[str] = Counter()
    with contextlib.ExitStack() as stack:
        stack.enter_context(paddle.utils.unique_name.guard())
        stack.enter_context(training.default_dtype(dtype))
        if extra.get(f"{MIXED}enable"):
            stack.enter_context(emulated())
            stack.enter_context(fused_products())
        if extra.get("Compress.Prune.enable"):
            stack.enter_context(pruned._pruned(training))
        for place in evidence:
            if ":" in place:
                stack.enter_context(_counted(place, seen))
        made = stack.enter_context(matmuls())
        cfg, ctx, runner = training.build(plan, world_size, "gpt", "sgd", micro_batch_size, extra)
        outputs = [training.take_step(runner, step, cfg, ctx, documents) for step in range(_STEPS)]
    for matmul in made:
        seen.update(matmul.uses)
    return {
        "numbers": [number for output in outputs for number in (output.loss, output.grad_norm)],
        "seen": {place: seen[place] for place in evidence},
    }


@contextlib.contextmanager
def _counted(place: str, seen: Counter[str]) -> Iterator[None]:
    original = pkgutil.resolve_name(place)

    def call(*args: Any, **kwargs: Any) -> Any:
        seen[place] += 1
        return original(*args, **kwargs)

    with mock.patch(place.replace(":", "."), call):
        yield


@contextlib.contextmanager
def matmuls() -> Iterator[list[Any]]:
    """The objects that the runner's layers multiply with."""
    from ppfleetx.parallel import parallelize

    made: list[Any] = []
    original = parallelize.Matmul

    def make(**options: Any) -> Any:
        made.append(original(**options))
        return made[-1]

    with mock.patch.object(parallelize, "Matmul", make):
        yield made


@contextlib.contextmanager
def fused_products() -> Iterator[None]:
    """Fused products as on a card: the CPU has no kernels for them."""
    import paddle
    from paddle import _C_ops

    from ppfleetx.nn import fused_ops

    def obstacles(asked: Sequence[str], types: Sequence[str], **_: Any) -> dict[str, dict[str, str | None]]:
        def one(name: str, dtype: str) -> str | None:
            return None if name in FUSED.values() and dtype in fused_ops.TABLE[name].types else "not here"

        return {name: {dtype: one(name, dtype) for dtype in types} for name in asked}

    def add(x: Any, upstream: Any, total: Any, *_: Any) -> tuple[Any, None]:
        # By NumPy, because the emulated auto_cast would have Paddle multiply in 16 bits.
        rows, columns = (t.astype("float32").numpy().reshape([-1, t.shape[-1]]) for t in (x, upstream))
        gradient = paddle.to_tensor(rows.T @ columns)
        return (gradient if total is None else total.add_(gradient)), None

    with (
        mock.patch.object(fused_ops, "obstacles", obstacles),
        mock.patch.object(_C_ops, "fused_linear_param_grad_add", add),
    ):
        yield


# -- around them


class Comparison:
    """Runs pairs, and the runs of one card that they are compared with once each."""

    def __init__(self, pools: Pools, directory: Path) -> None:
        self._pools, self._directory = pools, directory
        self._teacher: str | None = None
        self._references: dict[str, list[float]] = {}

    def faults(self, pair: Pair) -> list[str]:
        """What is wrong with a pair that the configuration accepts; empty: nothing."""
        plan = pair.plan
        evidence = list(dict.fromkeys(option.evidence for option in pair.options))
        ranks = self._run(pair, plan, evidence)
        found = []
        if any(rank["numbers"] != ranks[0]["numbers"] for rank in ranks):
            found.append("ranks differ")
        found += [
            f"{place} has no effect" for place in evidence if not any(rank["seen"][place] for rank in ranks)
        ]
        expected = self._reference(pair)
        worst = apart(ranks[0]["numbers"][::2], expected[::2])
        limit = _ON_A_GRID if pair.has("grid") and pair.dtype != "float32" else _TOLERANCES[pair.dtype]
        if not worst <= limit:
            found.append(f"differs from one card by {worst:.1e}")
        return found

    def _reference(self, pair: Pair) -> list[float]:
        key = str((pair.keys("", one_card=True), pair.has("documents"), pair.has("grid")))
        if key not in self._references:
            (rank,) = self._run(pair, Plan(), [])
            self._references[key] = rank["numbers"]
        return self._references[key]

    def _run(self, pair: Pair, plan: Plan, evidence: list[str]) -> list[dict[str, Any]]:
        return self._pools.run(
            plan,
            "tests.parity.option_pairs:train",
            micro_batch_size=micro_batch_size_of(plan),
            extra=pair.keys(self._place_of_teacher(pair), one_card=plan.world_size == 1),
            evidence=evidence,
            dtype="float64" if pair.has("grid") and pair.dtype == "float32" else "float32",
            documents=pair.has("documents"),
        )

    def _place_of_teacher(self, pair: Pair) -> str:
        if "distillation" not in pair.names:
            return ""
        if self._teacher is None:
            self._teacher = str(self._directory / "teacher")
            self._pools(1).run("tests.compress.plans:save_teacher", place=self._teacher)
        return self._teacher


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-k", "--words", nargs="*", default=[])
    parser.add_argument("--types", nargs="+", default=TYPES)
    arguments = parser.parse_args()
    counts, refusals = Counter(), {}
    with tempfile.TemporaryDirectory() as directory, Pools() as pools:
        comparison = Comparison(pools, Path(directory))
        for pair in pairs(arguments.words):
            if pair.dtype not in arguments.types:
                continue
            refused = pair.refusal()
            if refused:
                counts["refused"] += 1
                refusals.setdefault(pair.names, refused)
                continue
            begun = time.monotonic()
            try:
                faults = comparison.faults(pair)
            except RanksFailedError as error:
                faults = [next(line for line in str(error).splitlines()[1:] if line.strip())]
            counts["failed" if faults else "equal"] += 1
            took = time.monotonic() - begun
            print(f"{'; '.join(faults) or 'equal':8} {pair} ({took:.1f} s)", flush=True)
    for names, refused in refusals.items():
        print(f"refused  {' x '.join(names)}: {refused.splitlines()[0]}")
    print(
        f"{counts['equal']} pairs equal one card, {counts['failed']} do not, {counts['refused']} are refused"
    )
    return int(counts["failed"] > 0)


if __name__ == "__main__":
    raise SystemExit(main())
