"""One short training run under one plan, in the ranks of a pool, compared with a run of one process.

``train`` is called by name in every rank (see tests/helpers/ranks.py). The run of one process writes its
weights to a directory; every other run compares its own slices with them, so that no rank needs to
gather anything.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ppfleetx.config.parallel_plan import CONFIG_KEYS
from tests.helpers.programs import ROOT

CONFIG = ROOT / "ppfleetx/configs/debug/gpt_nano.yaml"
BUCKET_BYTES = 8192
SEQ_LEN, VOCAB, GLOBAL_BATCH, STEPS = 16, 125, 16, 5

SIZES = {
    "vocab_size": VOCAB,
    "vocab_size_divisible_unit": 128,
    "hidden_size": 32,
    "num_layers": 8,
    "num_attention_heads": 16,
    "head_dim": 4,
    "ffn_hidden_size": 64,
    "max_position_embeddings": SEQ_LEN,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
    # Wide initial weights: the gradient is then far above the clip, and its parts differ in size.
    "initializer_range": 0.2,
}
MODELS = {
    "gpt": {},
    "llama": {
        "position_embedding_type": "rope",
        "num_query_groups": 8,
        "hidden_act": "swiglu",
        "normalization": "RMSNorm",
        "tie_word_embeddings": False,
        "add_bias_linear": False,
    },
}
# Blocks of other architectures, all in one: GPT-NeoX's order, Qwen3's norms, Mistral's window.
MODELS["mixed"] = {
    **MODELS["llama"],
    "parallel_residual": True,
    "qk_layernorm": True,
    "attention_window": 5,
    "rotary_percent": 0.5,
    "tie_word_embeddings": True,
    "add_qkv_bias": True,
}
# Gemma's factors, soft limits, norms and layers by pattern, and layers without positions.
MODELS["gemma"] = {
    **MODELS["llama"],
    "hidden_act": "geglu_tanh",
    "normalization": "RMSNorm1P",
    "sandwich_norm": True,
    "embedding_multiplier": 2.0,
    "residual_multiplier": 0.8,
    "attention_multiplier": 0.3,
    "logits_multiplier": 0.7,
    "attn_logit_softcapping": 2.0,
    "final_logit_softcapping": 5.0,
    "attention_window": 5,
    "attention_window_layers": "[0, 2, 3]",
    "local_rotary_base": 100.0,
    "rotary_layers": "[0, 1, 2]",
    "tie_word_embeddings": True,
}
# OLMo's norms: behind the branches, and over all queries and keys of a layer.
MODELS["olmo"] = {**MODELS["llama"], "qk_layernorm": "all_heads", "sandwich_norm": True, "pre_norm": False}
# StableLM 2's norms of heads.
# Heads of 8: LayerNorm over the usual 4 numbers amplifies rounding.
MODELS["stablelm"] = {
    **MODELS["llama"],
    "normalization": "LayerNorm",
    "qk_layernorm": "each_head",
    "head_dim": 8,
}
# BLOOM's positions, and one norm for both branches, as in GPT-J, Falcon and Cohere.
MODELS["alibi"] = {
    "position_embedding_type": "alibi",
    "embedding_norm": True,
    "normalization": "LayerNorm1P",
    "parallel_residual": True,
    "shared_input_norm": True,
}
# OPT's rows of positions and Cohere's norms.
MODELS["offset"] = {"position_offset": 2, "normalization": "LayerNormNoBias"}
# Experts with biases, wide ones, beside a shared one with a gate; losses of sequences and of positions.
MODELS["moe"] = {
    "moe": "{num_experts: 4, top_k: 2, expert_ffn_size: 32, layer_freq: 2, shared_experts: {ffn_size: 16, "
    "gate: true}, aux_loss: {kind: sequence, weight: 0.1}, z_loss_weight: 0.01}"
}
# DeepSeek's router, whose bias moves after each step, and a loss by the loads of the step before.
MODELS["moe_bias"] = {
    **MODELS["llama"],
    "moe": "{num_experts: 8, top_k: 2, expert_ffn_size: 16, first_dense_layers: 1, router: {score: sigmoid, "
    "bias: true, num_groups: 4, top_groups: 2, scale: 1.5}, aux_loss: {kind: switch, weight: 0.1}, "
    "bias_update_rate: 0.01}",
}
# DeepSeek's attention; sizes are those of ordinary heads, so that the same plans divide them.
MODELS["latent"] = {
    **MODELS["llama"],
    "num_query_groups": 16,
    "head_dim": "null",
    "rotary_interleaved": True,
    "latent_attention.q_rank": 12,
    "latent_attention.kv_rank": 10,
    "latent_attention.rope_head_dim": 4,
    "latent_attention.nope_head_dim": 3,
    "latent_attention.value_head_dim": 5,
}
OPTIMIZERS = {
    # Small enough steps that a difference in the last digit of a gradient stays one.
    "adamw": {"name": "AdamW", "weight_decay": 0.1, "lr.max_lr": 1e-3, "lr.min_lr": 1e-4},
    "sgd": {"name": "SGD", "lr.max_lr": 0.1, "lr.min_lr": 0.01},
}


def overrides(
    plan: dict[str, Any], model: str, optimizer: str, micro_batch_size: int, extra: dict[str, Any]
) -> list[str]:
    """Command-line overrides of a run."""
    values: dict[str, Any] = {
        "Global.global_batch_size": GLOBAL_BATCH,
        "Global.local_batch_size": "null",
        "Global.micro_batch_size": micro_batch_size,
        "Engine.max_steps": STEPS,
        "Data.Train.dataset.max_seq_len": SEQ_LEN,
        "Data.Eval.dataset.max_seq_len": SEQ_LEN,
        "Optimizer.lr.warmup_steps": 2,
        "Optimizer.grad_clip.clip_norm": 0.5,
        "Distributed.bucket_size": BUCKET_BYTES / 2**20,
        **{f"Optimizer.{key}": value for key, value in OPTIMIZERS[optimizer].items()},
        **{f"Model.{key}": value for key, value in {**SIZES, **MODELS[model]}.items()},
        **{CONFIG_KEYS[key]: value for key, value in plan.items()},
        **extra,
    }
    return [f"{key}={value}" for key, value in values.items()]


def global_batch(step: int, documents: bool = False) -> dict[str, np.ndarray]:
    """All sequences of a step; the shares of padding differ widely between sequences."""
    generator = np.random.default_rng(100 + step)
    tokens = generator.integers(0, VOCAB, (GLOBAL_BATCH, SEQ_LEN + 1))
    lengths = generator.integers(1, SEQ_LEN + 1, GLOBAL_BATCH)
    lengths[step % GLOBAL_BATCH] = 0  # one sequence is all padding
    positions = np.arange(SEQ_LEN)
    batch = {
        "tokens": tokens[:, :-1],
        "labels": tokens[:, 1:],
        "loss_mask": (positions < lengths[:, None]).astype(np.float32),
        "position_ids": np.tile(positions, (GLOBAL_BATCH, 1)),
    }
    if documents:
        cuts = generator.integers(1, SEQ_LEN, (GLOBAL_BATCH, 1))
        batch["document_start"] = np.where(positions < cuts, 0, cuts).astype(np.int32)
    return batch


def micro_batches(step: int, cfg: Any, ctx: Any, documents: bool = False) -> list[dict[str, np.ndarray]]:
    """This replica's micro batches of a step, cut as the sampler cuts a global batch."""
    batch, size = global_batch(step, documents), cfg.batch.local_batch_size
    rows = np.split(np.arange(ctx.data_rank * size, (ctx.data_rank + 1) * size), cfg.batch.accumulate_steps)
    return [{name: array[part] for name, array in batch.items()} for part in rows]


def train(
    plan: dict[str, Any],
    world_size: int,
    model: str,
    optimizer: str,
    micro_batch_size: int,
    weights_dir: str | None,
    steps: int = STEPS,
    extra: dict[str, Any] | None = None,
    documents: bool = False,
    dtype: str = "float32",
) -> dict[str, Any]:
    """Train ``steps`` steps.

    Args:
        plan: fields of the plan that differ from 1.
        weights_dir: where the run of one process leaves its first and last weights, and others read them;
            None: nothing is compared.
        extra: more overrides.
        documents: several documents are packed into each sequence, which must not see each other.
        dtype: type of parameters and activations. With rounding in the network, a sum in another order
            rarely, but then visibly, takes an element to the next point of its grid: not in float64.
    """
    import paddle

    with paddle.utils.unique_name.guard(), default_dtype(dtype):
        cfg, ctx, runner = build(plan, world_size, model, optimizer, micro_batch_size, extra or {})
        first = _compare(runner, weights_dir, "first.npz", ctx)
        eval_before = runner.eval_step(micro_batches(steps, cfg, ctx, documents))
        outputs = [take_step(runner, step, cfg, ctx, documents) for step in range(steps)]
        eval_after = runner.eval_step(micro_batches(steps, cfg, ctx, documents))
        last = _compare(runner, weights_dir, "last.npz", ctx)
    return {
        "loss": [eval_before[0] / eval_before[1], *(o.loss for o in outputs), eval_after[0] / eval_after[1]],
        "grad_norm": [output.grad_norm for output in outputs],
        "tokens": [output.num_valid_tokens for output in outputs],
        "metrics": [m.mean for output in outputs for _, m in sorted(output.metrics.items())],
        "first_weights": first,
        "last_weights": last,
    }


@contextlib.contextmanager
def default_dtype(dtype: str) -> Iterator[None]:
    """Within the context, new parameters have this type."""
    import paddle

    before = paddle.get_default_dtype()
    paddle.set_default_dtype(dtype)
    try:
        yield
    finally:
        paddle.set_default_dtype(before)


def build(
    plan: dict[str, Any],
    world_size: int,
    model: str,
    optimizer: str,
    micro_batch_size: int,
    extra: dict[str, Any],
    sources: Sequence[str] = (),
) -> tuple[Any, Any, Any]:
    """Configuration, context and runner, as the program makes them."""
    from ppfleetx.config.loader import load_config
    from ppfleetx.core.module.build import build_module
    from ppfleetx.distributed import collectives
    from ppfleetx.distributed.init import init_distributed
    from ppfleetx.parallel import sharding
    from ppfleetx.parallel.parallelize import parallelize

    # Many buckets, and gradients that are sent in the middle of a step, with a model this small.
    collectives.BUCKET_BYTES = sharding.BUCKET_BYTES = BUCKET_BYTES
    given = overrides(plan, model, optimizer, micro_batch_size, extra)
    cfg = load_config(CONFIG, given, world_size=world_size)
    ctx = init_distributed(cfg)
    return cfg, ctx, parallelize(build_module(cfg, sources), cfg, ctx, train=True)


def take_step(runner: Any, step: int, cfg: Any, ctx: Any, documents: bool = False) -> Any:
    """One optimizer step, ``step`` counted from 0."""
    return runner.train_step(
        micro_batches(step, cfg, ctx, documents),
        step=step + 1,
        lr=cfg.Optimizer.lr.max_lr * min(1.0, (step + 1) / 2),
        weight_decay=0.1,
    )


def train_part(
    plan: dict[str, Any],
    world_size: int,
    model: str,
    micro_batch_size: int,
    first_step: int,
    end_step: int,
    load_from: str | None,
    save_to: str | None,
    extra: dict[str, Any] | None = None,
    dtype: str = "float32",
) -> list[float]:
    """Losses and gradient norms of some steps with AdamW, from a checkpoint and to another."""
    import paddle

    from ppfleetx.checkpoint.manager import CheckpointManager
    from ppfleetx.checkpoint.reader import open_checkpoint
    from ppfleetx.checkpoint.state_dict import load_model, load_optimizer, model_slices, optimizer_slices

    with paddle.utils.unique_name.guard(), default_dtype(dtype):
        cfg, ctx, runner = build(plan, world_size, model, "adamw", micro_batch_size, extra or {})
        if load_from is not None:
            checkpoint, names = open_checkpoint(Path(load_from)), runner.model_names()
            load_model(runner.named_parameters(), checkpoint, model_names=names)
            state = runner.optimizer_state()
            load_optimizer(state, runner.named_parameters(), checkpoint, model_names=names)
        outputs = [take_step(runner, step, cfg, ctx) for step in range(first_step, end_step)]
        if save_to is not None:
            written = [(name, p) for name, p in runner.named_parameters() if runner.writes(p)]
            names = {name for name, _ in written}
            state = {key: value for key, value in runner.optimizer_state().items() if key[0] in names}
            tensors = [*model_slices(written), *optimizer_slices(state, written)]
            manager = CheckpointManager(save_to, ctx=ctx, vocab_size=VOCAB)
            manager.save(epoch=0, step=end_step, tensors=tensors, state={})
    return [number for output in outputs for number in (output.loss, output.grad_norm)]


def _compare(runner: Any, weights_dir: str | None, file: str, ctx: Any) -> float:
    """Largest difference of a weight of this rank from the stored one, relative to the largest of its
    tensor. The run of one process stores its weights and gives 0."""
    if weights_dir is None:
        return 0.0
    path = Path(weights_dir) / file
    mine = {name: (parameter.info, parameter.numpy()) for name, parameter in runner.named_parameters()}
    if ctx.world_size == 1:
        np.savez(path, **{name: array for name, (_, array) in mine.items()})
        return 0.0
    worst = 0.0
    with np.load(path) as stored:
        for name, (info, array) in mine.items():
            whole = stored[name]
            assert whole.shape == tuple(info.global_shape), name
            place = zip(info.offset, info.local_shape, strict=True)
            part = whole[tuple(slice(start, start + size) for start, size in place)]
            assert part.shape == array.shape, name
            worst = max(worst, float(np.abs(part - array).max() / max(np.abs(whole).max(), 1e-30)))
    return worst


def dropout_masks(plan: dict[str, Any], world_size: int) -> list[dict[str, str]]:
    """What both kinds of dropout keep on this rank, in two micro batches of a step and in the next step."""
    import paddle

    from ppfleetx.config.loader import load_config
    from ppfleetx.distributed.init import init_distributed
    from ppfleetx.distributed.random import DropoutStreams
    from ppfleetx.nn.layer_factory import layer_factory

    cfg = load_config(CONFIG, overrides(plan, "gpt", "sgd", 1, {}), world_size=world_size)
    ctx = init_distributed(cfg)
    factory, streams = layer_factory(ctx), DropoutStreams(cfg.Global.seed, ctx)

    class Drops(paddle.nn.Layer):
        def __init__(self) -> None:
            super().__init__()
            self.trunk, self.heads = factory.dropout(0.5), factory.dropout(0.5, inside_heads=True)

        def forward(self, ones: paddle.Tensor) -> dict[str, str]:
            return {
                name: "".join(str(int(kept)) for kept in (drop(ones) > 0).numpy())
                for name, drop in (("trunk", self.trunk), ("heads", self.heads))
            }

    layers = [Drops(), Drops()]
    streams.attach(enumerate(layers))
    ones, drawn = paddle.ones([64]), []
    for step, passes in ((1, 2), (2, 1)):
        streams.begin_step(step)
        drawn += [layer(ones) for _ in range(passes) for layer in layers]
    return drawn


def held_after_step(plan: dict[str, Any], world_size: int) -> dict[str, float]:
    """Elements this rank holds after a step, as shares of the model's parameters.

    Gradients are counted where the update begins.
    """
    import paddle

    with paddle.utils.unique_name.guard():
        cfg, ctx, runner = build(plan, world_size, "gpt", "adamw", 4, {})
        parameters = runner.model.parameters()
        gradients: list[int] = []
        clip = runner._sync.clip

        def count_then_clip(norm: float, max_norm: float) -> None:
            gradients.extend(p.grad.size for p in parameters if p.grad is not None)
            clip(norm, max_norm)

        runner._sync.clip = count_then_clip
        take_step(runner, 0, cfg, ctx)
        whole = sum(int(np.prod(p.info.local_shape)) for p in parameters)
        states = sum(state.size for (_, kind), state in runner.optimizer_state().items() if kind == "moment1")
        values = sum(p.size for p in parameters if p._is_initialized())
    return {"values": values / whole, "gradients": sum(gradients) / whole, "states": states / whole}


def misaligned(plan: dict[str, Any], world_size: int, sizes: dict[str, Any]) -> dict[str, list[str]]:
    """What of the ``given`` to two updates (values and gradients; canonical names) lies where no tensor with
    memory of its own would begin."""
    import paddle

    from ppfleetx.optims.gradients import gradient_of

    wrong: set[str] = set()
    with paddle.utils.unique_name.guard():
        cfg, ctx, runner = build(plan, world_size, "gpt", "adamw", 4, sizes)
        given = dict(runner._optimizer.named_params)

        def look() -> None:
            for name, parameter in given.items():
                for tensor in (parameter, gradient_of(parameter)):
                    if tensor.data_ptr() % 256:
                        wrong.add(name)

        runner.before_update = look
        for step in range(2):
            take_step(runner, step, cfg, ctx)
    return {"given": sorted(given), "misaligned": sorted(wrong)}
