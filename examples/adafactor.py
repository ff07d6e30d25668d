"""Adafactor (Shazeer and Stern, 2018) without momentum: one state for each parameter, where AdamW has two."""

import paddle

from ppfleetx.config.registries import OPTIMIZERS, OptimizerTraits
from ppfleetx.optims.rule import Rule, StateSpec


@OPTIMIZERS.register(
    "Adafactor", traits=OptimizerTraits(states=1, reads=("beta2", "weight_decay"), needs_whole_matrices=True)
)
class Adafactor(Rule):
    """p -= lr * (max(rms(p), 1e-3) * u / max(1, rms(u)) + decay p), with u = g / sqrt(v).

    The v of a matrix is an outer product: the mean squares of its rows, times those of its columns, divided
    by their mean. States have the shape of their parameter, so ``square`` is the whole product; the means of
    its rows and columns are the two factors again.
    """

    states = (StateSpec("square"),)
    needs_whole = True  # for the means of rows and columns

    def update(self, group, *, lr, weight_decay):
        for view in group:
            square = view.states["square"]
            beta2 = self.cfg.beta2 if float(square.max()) else 0.0  # the first step has no average yet
            average = beta2 * square + (1 - beta2) * (view.gradient.square() + 1e-30)
            if average.ndim > 1:
                rows, columns = (average.mean(axis, keepdim=True) for axis in (-1, -2))
                average = rows * (columns / columns.mean(-1, keepdim=True))
            paddle.assign(average, square)
            change = view.gradient / square.sqrt()
            size = rms(view.value).clip(min=1e-3) / rms(change).clip(min=1.0)
            view.value.scale_(1 - lr * weight_decay)
            view.value.subtract_(lr * size * change)


def rms(tensor):
    """Root of the mean square, of each matrix where there are several (experts)."""
    axes = list(range(tensor.ndim))[-2:]
    return tensor.square().mean(axes, keepdim=True).sqrt()
