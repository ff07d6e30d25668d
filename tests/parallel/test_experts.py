"""Parameters of the experts' view beside dense ones: sums, owners, norm and checkpoints equal one card's."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ppfleetx.checkpoint.reader import open_checkpoint
from ppfleetx.config.plan import ParallelPlan as Plan
from tests.parity.training import CONFIG, VOCAB, overrides

STEPS = "tests.parallel.test_experts:steps"


@pytest.fixture(scope="module")
def one_card(comparison, tmp_path_factory):
    directory = str(tmp_path_factory.mktemp("one"))
    (result,) = comparison.pools.run(Plan(), STEPS, ep=1, save_to=directory)
    return result


@pytest.mark.parametrize(
    ("plan", "ep"),
    [
        (Plan(dp=2), 2),
        (Plan(mp=2), 2),
        (Plan(dp=4), 2),
        (Plan(dp=4), 4),
        (Plan(dp=2, mp=2), 2),
        (Plan(dp=2, pp=2), 2),
        (Plan(sharding=4), 2),
        (Plan(dp=2, sharding=2, sharding_stage=2), 2),
        (Plan(sharding=4, sharding_stage=3), 2),
        (Plan(sharding=2, sharding_stage=3), 2),
    ],
    ids=lambda value: str(value) if isinstance(value, Plan) else f"ep {value}",
)
def test_experts_train_as_on_one_card(comparison, one_card, tmp_path, plan, ep):
    """Some ranks see no token for their experts, where others of their group do."""
    read = one_card["path"]
    results = comparison.pools.run(plan, STEPS, ep=ep, save_to=str(tmp_path), read=read)
    original, saved = open_checkpoint(read), open_checkpoint(results[0]["path"])
    assert set(saved.names()) == set(original.names()) == {"toy.experts", "toy.gain"}
    assert set(saved.keys("optimizer")) == set(original.keys("optimizer"))
    for name in saved.names():
        np.testing.assert_allclose(saved.read(name), original.read(name), rtol=1e-5, atol=1e-6)
    for result in results:
        np.testing.assert_allclose(result["norms"], one_card["norms"], rtol=1e-6)
        for name, state, offset, values in result["loaded"]:
            here = np.array(values, np.float32)
            kind, shape = "optimizer" if state else "model", here.shape
            assert np.array_equal(here, original.read(name, kind, state, offset=tuple(offset), shape=shape))
    written = [name for result in results for name in result["written"]]
    assert written.count("toy.gain") == 1 and written.count("toy.experts") == ep


@pytest.mark.parametrize("plan", [Plan(), Plan(dp=2, ep=2)], ids=str)
def test_a_run_whose_tokens_all_go_to_one_expert_goes_on_and_says_so(comparison, plan):
    call = "tests.parallel.test_experts:all_to_one_expert"
    (one,) = comparison.pools.run(Plan(), call)
    found = comparison.pools.run(plan, call)
    for rank in found:
        np.testing.assert_allclose(rank["losses"], one["losses"], rtol=1e-6)
        assert rank["loads"] == [4.0] * 22
    said, *others = [[text for text in rank["said"] if "without a position" in text] for rank in found]
    assert [text.partition(":")[0] for text in said] == ["layer 0", "layer 1"]  # once each, on the first rank
    assert "3 of 4 get none" in said[0] and not any(others)


# -- in the ranks

EXPERTS, WIDTH, TOKENS = 4, 6, 8


def gradients_of_tokens(step: int) -> tuple[np.ndarray, np.ndarray]:
    """What each token of a step adds to the gradients: of the gain, and of the expert that it goes to.

    One half of the tokens goes to the first two experts, the other to the third, and none to the last.
    """
    rng, half = np.random.default_rng(step), TOKENS // 2
    goes_to = np.concatenate([rng.integers(0, 2, half), np.full(half, 2)])
    dense, routed = rng.standard_normal((TOKENS, WIDTH)), np.zeros((TOKENS, EXPERTS, WIDTH))
    routed[np.arange(TOKENS), goes_to[:: 1 if step % 2 else -1]] = rng.standard_normal((TOKENS, WIDTH))
    return dense.astype(np.float32), routed.astype(np.float32)


def toy(factory: Any, ctx: Any) -> Any:
    """A gain of the dense view on the first pipeline rank, and on the last one vectors of experts."""
    import paddle

    from ppfleetx.nn.init import Constant, Normal
    from ppfleetx.nn.param_spec import PARTIAL, ParamSpec, Shard, dense
    from ppfleetx.nn.stage import Stage, build_stage

    class Toy(paddle.nn.Layer):
        def __init__(self) -> None:
            super().__init__()
            self.gain = self.experts = None
            if ctx.rank_on("pp") == 0:
                self.gain = self.create_parameter([WIDTH])
                factory.declare(self.gain, dense((WIDTH,), Constant(1.0), "norm"))
            if ctx.rank_on("pp") == ctx.size_of("pp") - 1:
                self.experts = self.create_parameter([EXPERTS // ctx.size_of("ep"), WIDTH])
                lies, leaves = {"ep": Shard(0)}, {"edp": PARTIAL}
                factory.declare(
                    self.experts, ParamSpec((EXPERTS, WIDTH), Normal(1.0), "matrix", lies, leaves)
                )

        def forward(self, state: tuple, cache: None = None) -> tuple:
            one, for_gain, for_experts = state
            total = one * 0
            if self.gain is not None:
                total = total + (self.gain * one * for_gain).sum()
            if self.experts is not None and for_experts.any():
                total = total + (self.experts * one * for_experts).sum()
            return (total, for_gain, for_experts)

    return build_stage(Stage("toy", Toy), None, empty=True)


def part_of(gradients: np.ndarray, plan: Any, ranks: list[int]) -> np.ndarray:
    """The sum over the tokens that ``ranks`` read."""
    per_rank = TOKENS // plan.data_size
    tokens = [plan.data_rank(rank) * per_rank + number for rank in ranks for number in range(per_rank)]
    return gradients[sorted(set(tokens))].sum(0)


def steps(
    plan: dict[str, Any], world_size: int, ep: int, save_to: str, read: str | None = None
) -> dict[str, Any]:
    """Norms of two steps, what is saved after them, and what the checkpoint ``read`` gives this rank."""
    import paddle

    from ppfleetx.checkpoint.reader import open_checkpoint
    from ppfleetx.checkpoint.save import CheckpointManager
    from ppfleetx.checkpoint.tensors import load_model, load_optimizer, model_slices, optimizer_slices
    from ppfleetx.config.loader import load_config
    from ppfleetx.distributed.init import init_distributed
    from ppfleetx.nn.factory import layer_factory
    from ppfleetx.parallel import parallelize
    from ppfleetx.parallel.precision import Precision

    with paddle.utils.unique_name.guard():
        cfg = load_config(CONFIG, overrides(plan, "gpt", "adamw", 2, {}), world_size=world_size)
        ctx = init_distributed(cfg)
        ctx = replace(ctx, plan=replace(ctx.plan, ep=ep, expert_mp=1))
        factory = layer_factory(ctx)
        layer = toy(factory, ctx)
        optimizer, sync = parallelize._optimizer_and_sync(
            layer, [(0, layer)], cfg, ctx, Precision(), True, factory
        )
        norms = []
        for step in (1, 2):
            for_gain, for_experts = gradients_of_tokens(step)
            holders = list(ctx.mesh.ranks_over(ctx.rank, ("ep",)))
            mine = slice(*(np.array([0, 1]) + ctx.rank_on("ep")) * (EXPERTS // ep))
            state = (
                paddle.ones([1]),
                paddle.to_tensor(part_of(for_gain, ctx.plan, [ctx.rank])),
                paddle.to_tensor(part_of(for_experts, ctx.plan, holders)[mine]),
            )
            state[0].stop_gradient = False
            sync.begin(1)
            layer(state)[0].backward()
            sync.reduce()
            norms.append(float(sync.norm()))
            sync.clip(norms[-1], 0.5)
            optimizer.step(lr=0.1, weight_decay=0.1)
            optimizer.clear_grad()
            sync.finish_values()
        named = [(p.info.name, p) for p in layer.parameters() if p._is_initialized()]
        written = [(name, p) for name, p in named if sync.writes(p)]
        names = [name for name, _ in written]
        kept = {key: value for key, value in optimizer.state().items() if key[0] in names}
        tensors = [*model_slices(written), *optimizer_slices(kept, written)]
        path = CheckpointManager(save_to, ctx=ctx, vocab_size=VOCAB).save(
            epoch=0, step=2, tensors=tensors, state={}
        )
        checkpoint, state = open_checkpoint(Path(read or path)), optimizer.state()
        for tensor in (*dict(named).values(), *state.values()):
            tensor.set_value(paddle.zeros_like(tensor))
        load_model(named, checkpoint, model_names=checkpoint.names())
        load_optimizer(state, named, checkpoint, model_names=checkpoint.names())
        params = dict(named)
        loaded = [(name, "", params[name].info.offset, params[name].tolist()) for name in params]
        loaded += [
            (name, which, params[name].info.offset, tensor.tolist())
            for (name, which), tensor in state.items()
            if which == "moment1"
        ]
    return {"path": str(path), "norms": norms, "loaded": loaded, "written": names}


def all_to_one_expert(plan: dict[str, Any], world_size: int) -> dict[str, Any]:
    """22 steps of a model whose routers give all experts the same score, so that the first one is chosen, and
    what the run says. Nothing is learned."""
    import logging

    import paddle

    from ppfleetx.utils.log import get_logger
    from tests.parity import training

    said: list[str] = []

    class Said(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(record.getMessage())

    moe = "{num_experts: 4, expert_ffn_size: 32, top_k: 1, aux_loss: {kind: none}}"
    extra = {"Model.num_layers": 2, "Model.hidden_dropout_prob": 0.0, "Model.moe": moe}
    cfg, ctx, runner = training.build(plan, world_size, "llama", "sgd", 2, extra)
    for name, parameter in runner.named_parameters():
        if name.endswith("router.weight"):
            parameter.set_value(paddle.zeros_like(parameter))
    batches, handler = training.micro_batches(0, cfg, ctx), Said(logging.WARNING)
    get_logger().addHandler(handler)
    try:
        steps = [runner.train_step(batches, step=n, lr=0.0, weight_decay=0.0) for n in range(1, 23)]
    finally:
        get_logger().removeHandler(handler)
    return {
        "losses": [step.loss for step in steps],
        "loads": [step.metrics["expert_load"].mean for step in steps],
        "said": said,
    }
