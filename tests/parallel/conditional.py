"""In the ranks of a pool: a model with a layer that only some batches use, or whose weight comes late."""

from __future__ import annotations

from functools import partial
from typing import Any

from tests.parity.training import build, take_step


def train(
    plan: dict[str, Any], world_size: int, micro_batch_size: int, name: str = "ConditionalGPT"
) -> list[list[float]]:
    """Loss and gradient norm of four steps."""
    import paddle

    from ppfleetx.config.registries import ARCHITECTURES
    from ppfleetx.models.gpt.layers import Block
    from ppfleetx.models.gpt.stages import gpt_stages
    from ppfleetx.nn.init import Normal

    class Wide(Block):
        """Its first product has a weight that goes through float64: the gradient of the block's input there
        before the weight's."""

        def __init__(self, factory: Any, spec: Any, **arguments: Any) -> None:
            super().__init__(factory, spec, **arguments)
            size = spec.hidden_size
            self.extra = factory.whole_linear(size, size, init=Normal(0.1), bias=False, of_trunk=True)

        def transform(self, hidden: Any, *arguments: Any) -> Any:
            weight = (self.extra.weight.astype("float64") * 1.0).astype(hidden.dtype)
            return super().transform(hidden + hidden @ weight, *arguments)

    class Conditional(Block):
        def __init__(self, factory: Any, spec: Any, **arguments: Any) -> None:
            super().__init__(factory, spec, **arguments)
            size = spec.hidden_size
            self.extra = factory.whole_linear(size, size, init=Normal(0.1), bias=True, of_trunk=True)

        def transform(self, hidden: Any, *arguments: Any) -> Any:
            hidden = super().transform(hidden, *arguments)
            used = (hidden[:, :, :1].sum(0, keepdim=True) > 0).astype(hidden.dtype)
            return hidden + self.extra(hidden) * used if used.any() else hidden

    for known, block in (("ConditionalGPT", Conditional), ("WideGPT", Wide)):
        if known not in ARCHITECTURES.names():
            ARCHITECTURES.register(known, partial(gpt_stages, block=block))
    with paddle.utils.unique_name.guard():
        extra = {"Model.name": name, "Model.num_layers": 4}
        cfg, ctx, runner = build(plan, world_size, "gpt", "sgd", micro_batch_size, extra)
        steps = [take_step(runner, step, cfg, ctx) for step in range(4)]
    return [[one.loss, one.grad_norm] for one in steps]
