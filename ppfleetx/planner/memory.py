"""Bytes on each rank of each pipeline stage, part by part, and in host memory.

Activations are the tensors that Paddle keeps for the backward pass of our own layers; with 16-bit
activations, dropout, learned positions and one tensor rank they are the 34sbh + 5as^2b of Korthikanti et al.
(2022, equation 1) with fused attention scores.
"""

from __future__ import annotations

from dataclasses import dataclass

from ppfleetx.planner.cards import GIB
from ppfleetx.planner.case import Case, Recompute
from ppfleetx.planner.network import Cluster
from ppfleetx.planner.parameters import Held, held_parameters

_BUCKET_BYTES = 64 << 20  # parallel sums are packed into pieces of this size (distributed/collectives.py)
_FRAGMENTS = 0.02
"""What the allocator loses to fragments, as a share of what it hands out."""


@dataclass(frozen=True)
class StageMemory:
    """Bytes of one rank, by part; :meth:`total` is the peak.

    Attributes:
        parameters: as the passes see them.
        gradients: as they are kept between passes.
        masters: float32 masters of 16-bit parameters.
        optimizer: moments.
        activations: kept for the backward passes of all micro batches in flight.
        logits: logits and what the loss keeps of them.
        temporary: what exists for a moment at the worst time: recomputed layers, gradients of activations,
            fetched parameters.
        buffers: packed communication.
        context: driver and libraries.
        fragments: what the allocator loses.
        host: in host memory: offloaded states, copies for saving in the background.
    """

    parameters: float
    gradients: float
    masters: float
    optimizer: float
    activations: float
    logits: float
    temporary: float
    buffers: float
    context: float
    fragments: float
    host: float

    @property
    def tensors(self) -> float:
        """What Paddle's allocator hands out at the peak: all but context and fragments."""
        return self.total - self.context - self.fragments

    @property
    def total(self) -> float:
        """Peak on the card."""
        return sum(getattr(self, part) for part in CARD_PARTS)


CARD_PARTS = (
    "parameters",
    "gradients",
    "masters",
    "optimizer",
    "activations",
    "logits",
    "temporary",
    "buffers",
    "context",
    "fragments",
)


def stage_memory(case: Case, cluster: Cluster, stage: int) -> StageMemory:
    """Memory of a rank of pipeline stage ``stage``."""
    precision, plan = case.precision, case.plan
    held = held_parameters(case, stage)
    masters = held.owned * precision.master_bytes
    moments = held.owned * 4 * case.moments
    host = masters + moments if plan.sharding_offload else 0.0
    if case.async_save:
        host += held.owned * (4 * case.moments + max(precision.master_bytes, precision.parameter_bytes))
    if plan.sharding_offload:
        masters = moments = 0.0
    parts = {
        "parameters": held.resident * precision.parameter_bytes,
        "gradients": _kept_gradients(case, held) * precision.gradient_bytes,
        "masters": masters,
        "optimizer": moments,
        "activations": _activations(case, stage),
        "logits": logit_bytes(case) if stage == plan.pp - 1 else 0.0,
        "temporary": _temporary(case, stage, held),
        "buffers": _buffers(case, held),
    }
    fragments = _FRAGMENTS * sum(parts.values())
    context = cluster.card.context_gib * GIB
    return StageMemory(**parts, context=context, fragments=fragments, host=host)


def least_memory(case: Case, cluster: Cluster) -> float:
    """Bytes that the fullest rank needs whatever its micro batch and recompute are: what a search looks at
    before it varies those."""
    precision, states = case.precision, 0.0
    if not case.plan.sharding_offload:
        states = precision.master_bytes + 4 * case.moments
    most = 0.0
    for stage in {0, case.plan.pp - 1}:
        held = held_parameters(case, stage)
        most = max(
            most,
            held.resident * precision.parameter_bytes
            + _kept_gradients(case, held) * precision.gradient_bytes
            + held.owned * states,
        )
    return most + cluster.card.context_gib * GIB


def _kept_gradients(case: Case, held: Held) -> int:
    """Gradients a rank has when the last backward pass ends: from sharding stage 2 on, the owner's."""
    return held.owned if case.plan.sharding > 1 and case.plan.sharding_stage > 1 else held.trained


def _tokens(case: Case) -> float:
    return case.micro_batch * case.seq_len / case.plan.sep


def layer_input_bytes(case: Case) -> float:
    """The activation between two layers on one rank."""
    split = case.plan.mp if case.plan.sequence_parallel else 1
    return _tokens(case) * case.model.hidden_size * case.precision.activation_bytes / split


def layer_activation_bytes(case: Case, recompute: Recompute) -> float:
    """What one layer keeps of one micro batch for its backward pass."""
    return (
        layer_input_bytes(case)
        if recompute == "full"
        else _outer_bytes(case, recompute) + _core_bytes(case, recompute)
    )


def _outer_bytes(case: Case, recompute: Recompute) -> float:
    """All but the attention core: inputs of norms and products, activations of the MLP, dropout masks."""
    model, e, t = case.model, case.precision.activation_bytes, case.plan.mp
    tokens, h = _tokens(case), model.hidden_size
    split = t if case.plan.sequence_parallel else 1
    drops = int(model.hidden_dropout_prob > 0)
    gates = 2 if model.is_gated else 1
    width = model.ffn_size / t
    # A norm keeps its input; the product behind it keeps the norm's output, gathered from all tensor ranks.
    mlp = tokens * (h * e / split + h * e + width * e * (gates + 1 + (gates - 1)) + drops * h / split)
    attention = tokens * (h * e / split + h * e + drops * h / split)
    if model.sandwich_norm:
        mlp += tokens * h * e / split
        attention += tokens * h * e / split
    if recompute == "full_attn":
        attention = tokens * h * e / split
    return mlp + attention


def _core_bytes(case: Case, recompute: Recompute) -> float:
    """Queries, keys, values, context, and scores where they are kept."""
    if recompute == "full_attn":
        return 0.0
    model, e, t = case.model, case.precision.activation_bytes, case.plan.mp
    q_width = model.num_attention_heads * model.head_size / t
    kv_width = model.kv_heads * model.head_size / t
    projected = _tokens(case) * (2 * q_width + 2 * kv_width) * e
    if recompute == "core_attn" or case.flash:
        return projected
    return projected + _score_elements(case) * _score_bytes(case)


def _score_elements(case: Case) -> float:
    heads = case.model.num_attention_heads / (case.plan.mp * case.plan.sep)
    return case.micro_batch * heads * case.seq_len**2


def _score_bytes(case: Case) -> float:
    """Softmax (in float32 where the model says so), the weights after dropout, the dropout's mask."""
    e = case.precision.activation_bytes
    softmax = 4 if case.model.softmax_in_fp32 else e
    if case.model.attention_probs_dropout_prob == 0:
        return softmax + (e if softmax != e else 0)
    return softmax + e + 1


def passes_in_flight(case: Case, stage: int) -> float:
    """Micro batches of one chunk that a stage keeps activations of at the worst time, averaged over chunks
    (Korthikanti et al. 2022, §4.2.3): p - stage with 1F1B, with v virtual stages of the first stage
    p (1 + (p - 1) / (p v))."""
    plan, p, v = case.plan, case.plan.pp, case.plan.virtual_pp_degree
    if v == 1:
        return min(case.accumulate, p - stage)
    ahead = (p - stage - 1) * 2 + (v - 1) * p + 1
    return min(case.accumulate * v, ahead) / v if plan.pp > 1 else 1


def _activations(case: Case, stage: int) -> float:
    kinds = case.layer_kinds(stage)
    per_micro_batch = sum(layer_activation_bytes(case, kind) * count for kind, count in kinds.items())
    if stage == 0:  # ids, and the embedding's dropout mask
        drops = int(case.model.hidden_dropout_prob > 0)
        per_micro_batch += _tokens(case) * (16 + drops * case.model.hidden_size)
    if stage == case.plan.pp - 1:
        split = case.plan.mp if case.plan.sequence_parallel else 1
        e, h = case.precision.activation_bytes, case.model.hidden_size
        per_micro_batch += _tokens(case) * h * e * (1 / split + 1)
    return per_micro_batch * passes_in_flight(case, stage)


def logit_bytes(case: Case) -> float:
    """Logits, their float32 form and the softmax that the loss keeps."""
    elements = _tokens(case) * case.model.padded_vocab_size / case.plan.mp
    e = case.precision.activation_bytes
    padded = case.model.padded_vocab_size != case.model.vocab_size
    return elements * (e + (4 if e == 2 or padded else 0) + 4)


def _temporary(case: Case, stage: int, held: Held) -> float:
    """The larger of what the loss's backward pass needs and what a layer's does."""
    e = case.precision.activation_bytes
    needs = [0.0]
    for kind in case.layer_kinds(stage):
        again = layer_activation_bytes(case, "none") - layer_activation_bytes(case, kind)
        scores = 0.0 if case.flash else 2 * _score_elements(case) * (4 if case.model.softmax_in_fp32 else e)
        width = _tokens(case) * max(
            case.model.ffn_size * (2 if case.model.is_gated else 1) / case.plan.mp,
            case.model.hidden_size,
        )
        needs.append(again + max(scores, 2 * width * e))
    if stage == case.plan.pp - 1:
        elements = _tokens(case) * case.model.padded_vocab_size / case.plan.mp
        needs.append(elements * (4 + e))
    fetched = 0.0
    if case.plan.sharding > 1 and case.plan.sharding_stage == 3:
        fetched = 2 * held.largest_layer * case.precision.parameter_bytes
    if case.plan.sharding > 1 and case.plan.sharding_stage > 1:
        fetched += min(_BUCKET_BYTES, held.trained * case.precision.gradient_bytes) * min(
            case.plan.sharding, 4
        )
    return max(needs) + fetched


def _buffers(case: Case, held: Held) -> float:
    """Packed gradients on their way."""
    plan = case.plan
    if plan.dp == plan.sep == plan.sharding == 1:
        return 0.0
    return 2 * min(_BUCKET_BYTES, held.trained * case.precision.gradient_bytes)
