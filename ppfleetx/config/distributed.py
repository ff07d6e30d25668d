"""Section ``Distributed``: the degrees of each kind of parallelism."""

from __future__ import annotations

from typing import Annotated, Literal

from ppfleetx.config.fields import Bool, CountInt, NumberChoice, PositiveInt, Section


class ShardingConfig(Section):
    """Optimizer states, gradients and parameters divided over the sharding ranks (ZeRO)."""

    sharding_degree: PositiveInt = 1
    """Ranks that share one copy of the states; they also split the batch."""
    sharding_stage: Annotated[Literal[1, 2, 3], NumberChoice] = 1
    """1 divides optimizer states, 2 also gradients, 3 also parameters."""
    sharding_offload: Bool = False
    """Keep the divided states in host memory (stages 2 and 3)."""
    reduce_overlap: Bool = False
    """Reduce gradients while the backward pass still runs (no effect yet: it waits for each sum)."""
    broadcast_overlap: Bool = False
    """Broadcast updated parameters while the next forward pass runs (no effect yet: it waits for them)."""


class DistributedConfig(Section):
    """World size = dp x mp x pp x sharding x sep."""

    dp_degree: PositiveInt | None = None
    """Data parallel replicas; null: what the world size leaves (1 when it is not known)."""
    mp_degree: PositiveInt = 1
    """Tensor parallel ranks of one layer."""
    pp_degree: PositiveInt = 1
    """Pipeline stages."""
    sep_degree: PositiveInt = 1
    """Ranks that split each sequence."""
    sharding: ShardingConfig = ShardingConfig()
    pp_layers: tuple[CountInt, ...] | None = None
    """Layers of each pipeline stage in model order (of each chunk with virtual stages); null: equal parts.
    The first also holds the embedding and the last the head, so that 0 layers can balance a pipeline."""
