"""Configuration section ``Distributed``: the degree of each kind of parallelism."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Annotated, Literal

from ppfleetx.config.errors import RuleError
from ppfleetx.config.field_types import Bool, CountInt, Degree, NumberChoice, PositiveFloat
from ppfleetx.config.parallel_plan import PipelineSchedule
from ppfleetx.config.section import Section


class ShardingConfig(Section):
    """ZeRO sharding: optimizer states, gradients and parameters are divided over the sharding ranks."""

    sharding_degree: Degree = 1
    """Number of ranks over which one copy of the states is divided. These ranks also split the batch."""
    sharding_stage: Annotated[Literal[1, 2, 3], NumberChoice] = 1
    """1 divides optimizer states, 2 also gradients, 3 also parameters."""
    sharding_offload: Bool = False
    """Keep optimizer states and master weights in host memory and update there (stages 2 and 3)."""
    reduce_overlap: Bool = True
    """Reduce gradients over the data-parallel, sharding and sep ranks while the backward pass is still
    running. false: reduce them after the backward pass (in stages 2 and 3, the backward pass waits for each
    reduction). Results do not change."""
    broadcast_overlap: Bool = True
    """Send updated parameters while the next forward pass runs (stages 1 and 2), and fetch the parameters of
    the next layer while a layer computes (stage 3); false: wait for each. Results do not change."""


class DistributedConfig(Section):
    """The degrees of parallelism.

    The number of processes is dp x mp x pp x sharding x sep. Expert parallelism adds none: it divides the
    dp x sharding x sep x mp ranks of each pipeline stage in a way of its own.
    """

    dp_degree: Degree | None = None
    """Data-parallel replicas; null: the world size divided by the other degrees (1 if the world size is
    unknown)."""
    mp_degree: Degree = 1
    """Number of tensor-parallel ranks."""
    pp_degree: Degree = 1
    """Pipeline stages."""
    pp_schedule: PipelineSchedule = "1f1b"
    """Pipeline schedule. `zb_h1` postpones the gradients of weights until a stage would otherwise be idle
    (ZB-H1, Qi et al. 2023). It takes somewhat more memory than `1f1b`, and needs `Model.virtual_pp_degree` 1.
    Results do not change."""
    overlap_p2p_comm: Bool = False
    """Send activations and gradients of a pipeline while the next pass runs, and start to receive them early.
    This needs `Model.virtual_pp_degree` 1. Results do not change."""
    mp_async_allreduce: Bool = False
    """All-reduce the gradient of a column-parallel layer's input over the tensor-parallel ranks while the
    gradient of the layer's weight is computed. Results do not change."""
    sp_async_reduce_scatter: Bool = False
    """The same with `Model.sequence_parallel`, where the all-reduce is a reduce-scatter. Results do not
    change."""
    recompute_allgather: Bool = False
    """With `sp_async_reduce_scatter`: keep only this rank's part of the input for the backward pass, and
    all-gather the whole input again while the gradient of the input is computed. Results do not change."""
    sep_degree: Degree = 1
    """Number of ranks that split each sequence (context parallelism)."""
    ep_degree: Degree = 1
    """Expert-parallel ranks, which divide the experts of a layer (`Model.moe`) among them. Tokens are sent to
    their experts and back. These ranks are existing ranks of a pipeline stage, so the job needs no more
    processes. `ep_degree` x `expert_mp_degree` must divide dp x sharding x sep x mp."""
    expert_mp_degree: Degree | None = None
    """Ranks that slice the matrices of each expert; null: `mp_degree`. 1 keeps experts whole even if
    attention is sliced, with fewer messages and larger matrix products."""
    sharding: ShardingConfig = ShardingConfig()
    bucket_size: PositiveFloat = 64.0
    """Size in MiB of two gradient buckets together: one is filled while the other is sent. With sharding
    stages 2 and 3, size of a single bucket. A larger gradient is sent alone. Smaller buckets are sent earlier
    but need more messages. Without `sharding.reduce_overlap`, buckets always have 64 MiB."""
    pp_layers: tuple[CountInt | tuple[CountInt, ...], ...] | None = None
    """Number of layers of each pipeline stage in model order; null: equal parts. With virtual stages, give a
    number for each chunk, or a list per virtual stage with a number per pipeline stage. The first stage also
    holds the embedding and the last one the head, so 0 layers there can balance a pipeline."""
    noop_layers: tuple[CountInt, ...] | None = None
    """Positions of empty (no-op) layers, counted from 0 in model order. Real and empty layers together are
    divided into equal parts, so this is a short form of `pp_layers`. `num_layers` does not include the empty
    layers."""

    @property
    def gradient_bucket_bytes(self) -> int | None:
        """``bucket_size`` in bytes, for gradients; None without ``sharding.reduce_overlap``."""
        return self.broadcast_bucket_bytes if self.sharding.reduce_overlap else None

    @property
    def broadcast_bucket_bytes(self) -> int:
        """``bucket_size`` in bytes, for broadcasts of small parameters, which are packed into shared
        messages. Does not depend on ``sharding.reduce_overlap``."""
        return int(self.bucket_size * 2**20)

    def violations(self) -> Iterator[RuleError]:
        if self.recompute_allgather and not self.sp_async_reduce_scatter:
            yield RuleError(
                ("recompute_allgather", "sp_async_reduce_scatter"),
                "the input is gathered again beside the scattered sum: set sp_async_reduce_scatter too",
            )
        lengths = [len(row) for row in self.pp_layers or () if isinstance(row, tuple)]
        if lengths and len(lengths) < len(self.pp_layers):
            yield RuleError(("pp_layers",), "holds numbers or lists, not both")
        if any(length != self.pp_degree for length in lengths):
            yield RuleError(
                ("pp_layers", "pp_degree"),
                f"each list is of one virtual stage and needs pp_degree {self.pp_degree} numbers",
            )
        if self.noop_layers is not None:
            if self.pp_layers is not None:
                yield RuleError(("noop_layers", "pp_layers"), "both keys divide the layers; give one of them")
            repeated = [place for place, count in Counter(self.noop_layers).items() if count > 1]
            if repeated:
                yield RuleError(("noop_layers",), f"place {repeated[0]} is named twice")

    def layers_of_chunks(self, num_layers: int, virtual_pp_degree: int) -> tuple[int, ...] | None:
        """The number of layers of each pipeline chunk; None if neither ``pp_layers`` nor a valid
        ``noop_layers`` is set."""
        if self.pp_layers is not None:
            rows = (row if isinstance(row, tuple) else (row,) for row in self.pp_layers)
            return tuple(number for row in rows for number in row)
        per_chunk, rest = divmod(num_layers + len(self.noop_layers or ()), self.pp_degree * virtual_pp_degree)
        if not self.noop_layers or rest or max(self.noop_layers) >= num_layers + len(self.noop_layers):
            return None  # not set, or values that config/resolve.py refuses
        empty = Counter(place // per_chunk for place in self.noop_layers)
        return tuple(per_chunk - empty[chunk] for chunk in range(self.pp_degree * virtual_pp_degree))
