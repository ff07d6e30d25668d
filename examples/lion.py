"""Lion (Chen et al., 2023): one momentum, and every weight moves by a sign."""

from ppfleetx.config.registries import OPTIMIZERS, OptimizerTraits
from ppfleetx.optims.rule import Rule, StateSpec


@OPTIMIZERS.register("Lion", traits=OptimizerTraits(states=1, reads=("beta1", "beta2", "weight_decay")))
class Lion(Rule):
    """p -= lr * (sign(beta1 m + (1 - beta1) g) + decay p);  m = beta2 m + (1 - beta2) g."""

    states = (StateSpec("momentum"),)

    def update(self, group, *, lr, weight_decay):
        for view in group:
            momentum = view.states["momentum"]
            direction = (self.cfg.beta1 * momentum + (1 - self.cfg.beta1) * view.gradient).sign()
            view.value.scale_(1 - lr * weight_decay)
            view.value.subtract_(lr * direction)
            momentum.scale_(self.cfg.beta2)
            momentum.add_((1 - self.cfg.beta2) * view.gradient)
