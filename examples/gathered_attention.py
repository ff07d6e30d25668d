"""Another attention strategy: each rank keeps its queries, and gets the keys and values of all ranks."""

import paddle

from ppfleetx.config.registries import ARCHITECTURES
from ppfleetx.distributed.collectives import exchange
from ppfleetx.models.gpt.stages import gpt_stages
from ppfleetx.nn.context_parallel import AttentionStrategy


class GatheredKeys(AttentionStrategy):
    """Each rank has consecutive positions, and attends from them to all positions up to their end."""

    has_own_core = True

    def __init__(self, group):
        self.group = group

    def positions(self, ids):
        return ids.split(self.group.nranks, axis=1)[self.group.rank]

    positions_inside = positions

    def core(self, attend, query, key, value, document_start):
        end = (self.group.rank + 1) * key.shape[2]
        key, value = (self._gathered(part)[:, :, :end] for part in (key, value))
        return attend(query, key, value, document_start)

    def _gathered(self, part):
        """``[b, g, s, d]`` of all ranks; each gets back the sum of the gradients of its own."""
        copies = paddle.concat([part] * self.group.nranks, axis=2)
        return exchange(copies, self.group, split_dim=2, concat_dim=2)


@ARCHITECTURES.register("GatheredGPT")
def gathered_gpt(cfg, factory):
    """GPT whose attention gathers keys and values under `Distributed.sep_degree`."""
    if factory.attention.group is not None:
        factory.attention = GatheredKeys(factory.attention.group)
    return gpt_stages(cfg, factory)
