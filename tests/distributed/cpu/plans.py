"""A small GPT in fleet's own layers, trained under a plan; every plan must give the serial run's losses.

Independent of ppfleetx's models on purpose: what is under test is fleet on the CPU process groups. Trunk
layout is [s, b, h]. Weights are functions of their name, sliced by rank, so all plans start equal.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from unittest import mock

import numpy as np
import paddle
import paddle.nn.functional as F
from paddle import nn
from paddle.distributed import fleet
from paddle.distributed.fleet import meta_parallel as mpu
from paddle.distributed.fleet.layers.mpu.mp_ops import _c_identity
from paddle.distributed.fleet.utils import sequence_parallel_utils as spu

from ppfleetx.distributed.cpu import backend as cpu_backend
from ppfleetx.distributed.cpu.arrays import TensorMemory

VOCAB, HIDDEN, HEADS, SEQ, BATCH = 64, 32, 4, 16, 8


@dataclass
class Plan:
    dp: int = 1
    mp: int = 1
    pp: int = 1
    sharding: int = 1
    sequence_parallel: bool = False
    virtual: int = 1
    layers: int = 2
    accumulate: int = 1
    recompute: bool = False
    p2p_overlap: bool = False  # activations are sent while others are computed
    mark_shared: bool = True  # False: Paddle as it is, with the tied gradient counted twice
    steps: int = 4
    learning_rate: float = 1e-2


def set_weight(parameter, name: str, axis: int | None = None, plan: Plan | None = None) -> None:
    """The named weight, or this rank's slice of it along ``axis``."""
    parts = plan.mp if plan is not None and axis is not None else 1
    shape = list(parameter.shape)
    if parts > 1:
        shape[axis] *= parts
    generator = np.random.default_rng(zlib.crc32(name.encode()))
    value = (generator.standard_normal(shape) * 0.1 + ("norm.weight" in name)).astype("float32")
    if parts > 1:
        rank = fleet.get_hybrid_communicate_group().get_model_parallel_rank()
        value = np.split(value, parts, axis)[rank]
    parameter.set_value(value)


def column(plan: Plan, name: str, n_out: int) -> nn.Layer:
    if plan.mp == 1:
        layer = nn.Linear(HIDDEN, n_out)
    else:
        kind = spu.ColumnSequenceParallelLinear if plan.sequence_parallel else mpu.ColumnParallelLinear
        layer = kind(HIDDEN, n_out, has_bias=True, gather_output=False)
    set_weight(layer.weight, f"{name}.weight", 1, plan)
    set_weight(layer.bias, f"{name}.bias", 0, plan)
    return layer


def row(plan: Plan, name: str, n_in: int) -> nn.Layer:
    if plan.mp == 1:
        layer = nn.Linear(n_in, HIDDEN)
    else:
        kind = spu.RowSequenceParallelLinear if plan.sequence_parallel else mpu.RowParallelLinear
        layer = kind(n_in, HIDDEN, has_bias=True, input_is_parallel=True)
    set_weight(layer.weight, f"{name}.weight", 0, plan)
    set_weight(layer.bias, f"{name}.bias")
    if plan.sequence_parallel:
        spu.mark_as_sequence_parallel_parameter(layer.bias)
    return layer


def norm(plan: Plan, name: str) -> nn.Layer:
    layer = nn.LayerNorm(HIDDEN)
    set_weight(layer.weight, f"{name}norm.weight")
    set_weight(layer.bias, f"{name}norm.bias")
    if plan.sequence_parallel:
        spu.mark_as_sequence_parallel_parameter(layer.weight)
        spu.mark_as_sequence_parallel_parameter(layer.bias)
    return layer


class Words(nn.Layer):
    """Word embedding; also the head's weight when tied (shared over the pipeline)."""

    def __init__(self, plan: Plan, name: str) -> None:
        super().__init__()
        kind = nn.Embedding if plan.mp == 1 else mpu.VocabParallelEmbedding
        self.table = kind(VOCAB, HIDDEN)
        set_weight(self.table.weight, name, 0, plan)

    @property
    def tied_weight(self):
        return self.table.weight

    def forward(self, tokens):
        return self.table(tokens)


class Positions(nn.Layer):
    """[b, s, h] word vectors -> [s, b, h], scattered over the sequence under sequence parallelism."""

    def __init__(self, plan: Plan) -> None:
        super().__init__()
        self.plan = plan
        self.table = nn.Embedding(SEQ, HIDDEN)
        set_weight(self.table.weight, "positions")

    def forward(self, words):
        x = (words + self.table(paddle.arange(SEQ))).transpose([1, 0, 2])
        return spu.ScatterOp.apply(x) if self.plan.sequence_parallel else x


class Block(nn.Layer):
    def __init__(self, plan: Plan, index: int) -> None:
        super().__init__()
        self.plan = plan
        self.norm1, self.norm2 = norm(plan, f"{index}.1"), norm(plan, f"{index}.2")
        self.qkv = column(plan, f"{index}.qkv", 3 * HIDDEN)
        self.out = row(plan, f"{index}.out", HIDDEN)
        self.up, self.down = column(plan, f"{index}.up", 4 * HIDDEN), row(plan, f"{index}.down", 4 * HIDDEN)

    def forward(self, x):
        if self.plan.recompute:
            return fleet.utils.recompute(self._forward, x)
        return self._forward(x)

    def _forward(self, x):
        x = x + self.out(self._attend(self.qkv(self.norm1(x))))
        return x + self.down(F.gelu(self.up(self.norm2(x))))

    def _attend(self, qkv):
        s, b, _ = qkv.shape
        heads, width = HEADS // self.plan.mp, HIDDEN // HEADS
        q, k, v = qkv.reshape([s, b, heads, 3 * width]).transpose([1, 2, 0, 3]).split(3, axis=-1)
        scores = paddle.matmul(q, k, transpose_y=True) / width**0.5
        mask = paddle.tril(paddle.ones([s, s])).astype("bool")
        weights = F.softmax(paddle.where(mask, scores, paddle.full_like(scores, -1e9)), axis=-1)
        return paddle.matmul(weights, v).transpose([2, 0, 1, 3]).reshape([s, b, heads * width])


class FinalNorm(nn.Layer):
    def __init__(self, plan: Plan) -> None:
        super().__init__()
        self.plan, self.norm = plan, norm(plan, "final.")

    def forward(self, x):
        x = self.norm(x)
        return spu.GatherOp.apply(x) if self.plan.sequence_parallel else x


def logits_of(plan: Plan, x, weight):
    """[s, b, h] -> [b, s, vocabulary / mp]."""
    if plan.mp > 1:
        x = _c_identity(x, group=fleet.get_hybrid_communicate_group().get_model_parallel_group())
    return paddle.matmul(x.transpose([1, 0, 2]), weight, transpose_y=True)


def token_loss(plan: Plan):
    parallel = mpu.ParallelCrossEntropy() if plan.mp > 1 else None

    def loss(logits, labels):
        if parallel is not None:
            return parallel(logits, labels).mean()
        return F.cross_entropy(logits, labels)

    return loss


class Whole(nn.Layer):
    """The model without a pipeline."""

    def __init__(self, plan: Plan) -> None:
        super().__init__()
        self.plan = plan
        self.words, self.positions = Words(plan, "words"), Positions(plan)
        self.blocks = nn.LayerList([Block(plan, i) for i in range(plan.layers)])
        self.final = FinalNorm(plan)

    def forward(self, tokens):
        x = self.positions(self.words(tokens))
        for block in self.blocks:
            x = block(x)
        return logits_of(self.plan, self.final(x), self.words.tied_weight)


def pipeline(plan: Plan) -> mpu.PipelineLayer:
    def tied_head(layer, x):
        return logits_of(plan, x, layer.tied_weight)

    words = mpu.SharedLayerDesc("words", Words, shared_weight_attr="tied_weight", plan=plan, name="words")
    last = mpu.SharedLayerDesc(
        "words", Words, tied_head, shared_weight_attr="tied_weight", plan=plan, name="words"
    )
    hcg = fleet.get_hybrid_communicate_group()
    model = mpu.PipelineLayer(
        layers=[
            words,
            mpu.LayerDesc(Positions, plan),
            *(mpu.LayerDesc(Block, plan, i) for i in range(plan.layers)),
            mpu.LayerDesc(FinalNorm, plan),
            last,
        ],
        topology=hcg.topology(),
        loss_fn=token_loss(plan),
        seg_method="layer:Block",
        num_virtual_pipeline_stages=plan.virtual if plan.virtual > 1 else None,
    )
    # Paddle compares p.name with the attribute's name, never finds the tied weight, and counts its
    # gradient once per stage in the global norm.
    for shared in model.shared_comm.values() if plan.mark_shared else ():
        (attribute,) = shared["weight_attr"]
        parameter = getattr(shared["layer"], attribute)
        parameter.is_firstly_shared = paddle.distributed.get_rank() == min(shared["ranks"])
    return model


def batch(step: int):
    generator = np.random.default_rng(1000 + step % 2)  # each twice, so that the loss falls
    tokens = generator.integers(0, VOCAB, (BATCH, SEQ + 1))
    return tokens[:, :-1].astype("int64"), tokens[:, 1:].astype("int64")


def init_fleet(plan: Plan) -> None:
    cpu_backend.install()
    fleet.base.topology._HYBRID_PARALLEL_GROUP = None  # a second plan in the same processes
    strategy = fleet.DistributedStrategy()
    strategy.hybrid_configs = {
        "dp_degree": plan.dp,
        "mp_degree": plan.mp,
        "pp_degree": plan.pp,
        "sharding_degree": plan.sharding,
    }
    # Every model-parallel rank reads the same data by itself.
    strategy.hybrid_configs["mp_configs"].need_broadcast_data = False
    strategy.hybrid_configs["pp_configs"].overlap_p2p_comm = plan.p2p_overlap
    strategy.pipeline_configs = {
        "accumulate_steps": plan.accumulate,
        "micro_batch_size": BATCH // plan.accumulate // plan.dp // plan.sharding,
        # Under sequence parallelism the activations of model-parallel ranks differ.
        "enable_partial_send_recv": not plan.sequence_parallel,
    }
    fleet.init(is_collective=True, strategy=strategy)


def train(**fields) -> dict:
    """Losses of the plan's steps, averaged over this rank's micro batches."""
    # The model below is plain: it gives strided tensors to Paddle's layers, which ours do not.
    with mock.patch.object(TensorMemory, "takes_strided", True):
        return _train(Plan(**fields))


def _train(plan: Plan) -> dict:
    serial = plan.dp * plan.mp * plan.pp * plan.sharding == 1
    with paddle.utils.unique_name.guard():
        if not serial:
            init_fleet(plan)
        model = pipeline(plan) if plan.pp > 1 else Whole(plan)
        if plan.sequence_parallel:
            spu.register_sequence_parallel_allreduce_hooks(model, plan.accumulate, False)
        optimizer = paddle.optimizer.AdamW(
            plan.learning_rate,
            parameters=model.parameters(),
            weight_decay=0.1,
            grad_clip=nn.ClipGradByGlobalNorm(0.5),
        )
        if not serial:
            model, optimizer = fleet.distributed_model(model), fleet.distributed_optimizer(optimizer)
        losses = [step(plan, model, optimizer, number) for number in range(plan.steps)]
    return {"losses": losses, "data_rank": data_rank(plan)}


def data_rank(plan: Plan) -> int:
    if plan.dp * plan.sharding == 1:
        return 0
    hcg = fleet.get_hybrid_communicate_group()
    return hcg.get_data_parallel_rank() * plan.sharding + hcg.get_sharding_parallel_rank()


def step(plan: Plan, model, optimizer, number: int) -> float:
    size = BATCH // (plan.dp * plan.sharding)
    rows = slice(data_rank(plan) * size, (data_rank(plan) + 1) * size)
    tokens, labels = (paddle.to_tensor(array[rows]) for array in batch(number))
    if plan.pp > 1:
        return float(model.train_batch([tokens, labels], optimizer).item())
    losses = []
    loss_fn = token_loss(plan)
    parts = [paddle.split(tensor, plan.accumulate) for tensor in (tokens, labels)]
    for inputs, targets in zip(*parts, strict=True):
        loss = loss_fn(model(inputs), targets) / plan.accumulate
        loss.backward()
        losses.append(float(loss.item()))
    optimizer.step()
    optimizer.clear_grad()
    return sum(losses)
