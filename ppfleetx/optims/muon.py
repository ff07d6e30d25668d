"""Muon (Jordan et al., 2024) for matrices, together with AdamW for all other parameters."""

from __future__ import annotations

from collections.abc import Sequence

import paddle
from paddle import Tensor

from ppfleetx.config.sections.optimizer import Coefficients, MuonScale, OptimizerConfig
from ppfleetx.distributed.device import has_kernels, on_card
from ppfleetx.nn.cpu_ops import bfloat16
from ppfleetx.nn.param_spec import Part
from ppfleetx.optims.adamw import AdamW
from ppfleetx.optims.param_groups import MUON_RULES
from ppfleetx.optims.rule import Group, ParamView, Rule, StateSpec

COEFFICIENTS: dict[Coefficients, list[tuple[float, float, float]]] = {
    "simple": [(3.4445, -4.7750, 2.0315)],
    "quintic": [
        (4.0848, -6.8946, 2.9270),
        (3.9505, -6.3029, 2.6377),
        (3.7418, -5.5913, 2.3037),
        (2.8769, -3.1427, 1.2046),
        (2.8366, -3.0525, 1.2012),
    ],
    "polar_express": [
        (8.2051, -22.9019, 16.4607),
        (4.0664, -2.8612, 0.5184),
        (3.9096, -2.8234, 0.5250),
        (3.2856, -2.4153, 0.4853),
        (2.2779, -1.6198, 0.3985),
        (1.8726, -1.2307, 0.3585),
        (1.8564, -1.2132, 0.3568),
        (1.8750, -1.2500, 0.3750),
    ],
    "aol": [
        (4.0098, -7.0585, 2.4635),
        (3.4585, -5.5479, 2.5959),
        (2.7573, -3.2939, 1.4254),
        (2.7215, -3.0494, 1.3169),
    ],
}
"""Coefficients (a, b, c) of each Newton-Schulz iteration, by the name of the table (Jordan et al., 2024;
Amsel et al., 2025; Boissin et al., 2025)."""


class Muon(Rule):
    """Update rule p -= lr * (decay * p + scale * O), where O is the orthogonalized momentum of a matrix.
    ``Optimizer.muon.split`` sets whether a fused weight, such as q, k and v, is divided into matrices that
    are orthogonalized separately."""

    states = (StateSpec("momentum"),)
    needs_whole = True

    def __init__(self, cfg: OptimizerConfig) -> None:
        super().__init__(cfg)
        self.muon = cfg.muon
        wanted = cfg.muon.newton_schulz_dtype == "auto"
        self._in_bfloat16 = wanted and (has_kernels("bfloat16") or bfloat16.serves("bfloat16"))

    def update(self, group: Sequence[ParamView], *, lr: float, weight_decay: float) -> None:
        mu = self.muon.momentum
        for view in group:
            momentum = view.states["momentum"]
            share = (1 - mu) * view.gradient
            momentum.scale_(mu)
            momentum.add_(share)
            update = share + mu * momentum if self.muon.nesterov else momentum
            change = self._of_each_matrix(update, () if view.spec is None else view.spec.parts)
            view.value.scale_(1 - lr * weight_decay)
            view.value.subtract_(lr * change)

    def _of_each_matrix(self, update: Tensor, parts: Sequence[Part]) -> Tensor:
        if not parts or self.muon.split == "none":
            return self._orthogonal(update)
        period = parts[0].period
        runs = update.reshape([*update.shape[:-1], -1, period])
        pieces = [runs[..., part.offset : part.offset + part.width] for part in parts]
        heads = self.muon.split == "heads" and parts[0].name in ("q", "k")
        fused = parts[0].name == "q" and len(parts) > 1  # several query heads for one key head
        widths = [min(p.width for p in parts) if fused else part.width for part in parts]
        changed = [
            self._orthogonalize_part(piece, width if heads else None)
            for piece, width in zip(pieces, widths, strict=True)
        ]
        return paddle.concat(changed, axis=-1).reshape(update.shape)

    def _orthogonalize_part(self, piece: Tensor, head_dim: int | None) -> Tensor:
        """Return ``piece``, one matrix of a fused weight, orthogonalized. If ``head_dim`` is given, each head
        is orthogonalized separately."""
        # piece: [..., in, runs, width]. The matrix's columns form `runs` groups of `width` adjacent columns
        # of the weight.
        if head_dim is None:
            return self._orthogonal(piece.flatten(-2)).reshape(piece.shape)
        *batch, rows, runs, width = piece.shape
        heads = piece.reshape([*batch, rows, runs * width // head_dim, head_dim])
        return self._orthogonal(heads.swapaxes(-2, -3)).swapaxes(-2, -3).reshape(piece.shape)

    def _orthogonal(self, matrix: Tensor) -> Tensor:
        rows, columns = matrix.shape[-2:]  # Paddle stores [in, out]; scales are defined for [out, in]
        cfg = self.muon
        low = self._in_bfloat16
        change = newton_schulz(matrix, cfg.steps, cfg.coefficients, cfg.epsilon, in_bfloat16=low)
        return change * scale_of(cfg.scale, fan_out=columns, fan_in=rows)


def newton_schulz(
    matrix: Tensor, steps: int, coefficients: Coefficients, epsilon: float, *, in_bfloat16: bool = False
) -> Tensor:
    """Orthogonalize each matrix in ``[..., m, n]`` approximately by Newton-Schulz iterations: move its
    singular values close to 1 and keep its singular vectors.

    Each step uses the next row of ``COEFFICIENTS[coefficients]``. After the last row, the steps start again
    from the first row; with ``polar_express``, they repeat the last row. Before the first step, a matrix is
    divided by its norm, or by ``epsilon`` if that is greater.

    Args:
        in_bfloat16: whether to iterate in bfloat16. On a CPU, only the operands of matmuls are rounded.
    """
    table = COEFFICIENTS[coefficients]
    norm = matrix.square().sum([-2, -1], keepdim=True).sqrt()
    x = matrix / paddle.clip(norm, min=epsilon)
    is_tall = x.shape[-2] > x.shape[-1]
    x = x.swapaxes(-2, -1) if is_tall else x
    multiply = paddle.matmul
    if in_bfloat16 and on_card():
        x = x.astype("bfloat16")
    elif in_bfloat16:
        multiply = bfloat16.matmul
    for step in range(steps):
        # polar_express repeats its last row; the other tables start again from the first.
        row = min(step, len(table) - 1) if coefficients == "polar_express" else step % len(table)
        a, b, c = table[row]
        gram = multiply(x, x, transpose_y=True)
        x = a * x + multiply(b * gram + c * multiply(gram, gram), x)
    x = x.astype(matrix.dtype)
    return x.swapaxes(-2, -1) if is_tall else x


def scale_of(kind: MuonScale, *, fan_out: int, fan_in: int) -> float:
    if kind == "original":
        return max(1.0, fan_out / fan_in) ** 0.5
    if kind == "unit_rms_norm":
        return (fan_out / fan_in) ** 0.5
    return (0.2 if kind == "match_rms_adamw" else 1.0) * max(fan_out, fan_in) ** 0.5


def muon(cfg: OptimizerConfig) -> list[Group]:
    rules: dict[str, type[Rule]] = {"Muon": Muon, "AdamW": AdamW}
    return [Group(name, rules[name](cfg), takes) for name, takes in MUON_RULES.items()]
