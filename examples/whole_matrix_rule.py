"""An optimizer with its own groups: matrices move by one rule, everything else by AdamW."""

from ppfleetx.config.registries import OPTIMIZERS, OptimizerTraits
from ppfleetx.optims.adamw import AdamW
from ppfleetx.optims.rule import Group, Rule, StateSpec


class NormalizedMomentum(Rule):
    """p -= lr * (m / rms(m) + decay p), with m = beta1 m + (1 - beta1) g: every matrix moves equally far."""

    states = (StateSpec("momentum"),)
    needs_whole = True

    def update(self, group, *, lr, weight_decay):
        for view in group:
            momentum = view.states["momentum"]
            momentum.scale_(self.cfg.beta1)
            momentum.add_((1 - self.cfg.beta1) * view.gradient)
            rms = momentum.square().mean().sqrt() + self.cfg.epsilon
            view.value.scale_(1 - lr * weight_decay)
            view.value.subtract_(lr * momentum / rms)


@OPTIMIZERS.register("NormalizedMatrices", traits=OptimizerTraits(states=2, needs_whole_matrices=True))
def normalized_matrices(cfg):
    """The matrices of the blocks, and the rest: embeddings, norms, biases."""
    matrices = Group("matrices", NormalizedMomentum(cfg), lambda spec: spec.kind == "matrix")
    return [matrices, Group("rest", AdamW(cfg))]
