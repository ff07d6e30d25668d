"""Detect training steps whose loss or gradient norm suddenly jumps (``Engine.spike``), before the weights are
updated. All ranks come to the same decision.

A value that is not finite is a spike. Once values of ``Engine.spike.min_steps`` steps are known, a value is
also a spike if it exceeds their median by more than a configured number of deviations. The deviation is
1.4826 times the median absolute deviation (MAD), but at least 1 % of the median. Only the values of the last
``Engine.spike.window`` steps are used.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any

from ppfleetx.config.sections.engine import SpikeConfig

_MAD_TO_DEVIATION = 1.4826
_LEAST_SHARE = 0.01
_SAME = 1e-3  # relative tolerance; float32 sums in another order differ by less

Repeat = Callable[[], tuple[float, float]]


@dataclass(frozen=True)
class Spike:
    """A training step whose loss or gradient norm jumped, and what was done about it.

    Attributes:
        step: number of the optimizer step. Its update was made only if ``action`` is ``repeated``.
        what: the value that jumped: ``loss`` or ``grad_norm``; ``loss`` if both jumped.
        loss, grad_norm: loss and gradient norm of the step.
        median, deviation: median and deviation of the last steps' values of ``what``; None if there were
            none.
        action: ``skip``: the update was left out. ``rewind``: the run went back to a checkpoint. ``stop``:
            the run ended. ``repeated``: the step was computed again, without a jump, and the new result was
            used.
        repeated_loss, repeated_grad_norm: the values when the step was computed again; None if it was not.
        to_step: for ``rewind``, the step of the checkpoint; else None.
        samples: the samples of the step, as positions in the training order: [first, one past the last].
            After a ``rewind``, the run skips all samples between the checkpoint and the end of this step.
    """

    step: int
    what: str
    loss: float
    grad_norm: float
    median: float | None
    deviation: float | None
    action: str
    repeated_loss: float | None = None
    repeated_grad_norm: float | None = None
    to_step: int | None = None
    samples: tuple[int, int] | None = None

    @property
    def value(self) -> float:
        return self.loss if self.what == "loss" else self.grad_norm

    @property
    def verdict(self) -> str:
        """The likely cause of the spike. It is ``data`` (the data or the model) if the step gave nearly the
        same values when it was computed again, ``machine`` if it gave other values, and ``unknown`` if it was
        not computed again."""
        if self.repeated_loss is None or self.repeated_grad_norm is None:
            return "unknown"
        same = _is_same(self.loss, self.repeated_loss) and _is_same(self.grad_norm, self.repeated_grad_norm)
        return "data" if same else "machine"

    def to_json(self) -> dict[str, Any]:
        tree = {**asdict(self), "verdict": self.verdict}
        return {
            key: None if isinstance(value, float) and not math.isfinite(value) else value
            for key, value in tree.items()
        }

    def __str__(self) -> str:
        name = {"loss": "loss", "grad_norm": "gradient norm"}[self.what]
        usual = "" if self.median is None else f", usually {self.median:.4g} +- {self.deviation:.2g}"
        text = f"global step {self.step}: a spike: the {name} is {self.value:.6g}{usual}"
        again = {
            "data": "; repeated, it is the same: the cause is in the data or the model",
            "machine": f"; repeated, the loss is {self.repeated_loss}, the gradient norm "
            f"{self.repeated_grad_norm}: the cause is in the machine",
            "unknown": "",
        }[self.verdict]
        done = {
            "skip": "; the step is skipped",
            "rewind": f"; back to the checkpoint of step {self.to_step}",
            "stop": "; nothing was updated",
            "repeated": "; the repeated step is taken",
        }[self.action]
        if self.samples is not None:
            done += f"; samples {self.samples[0]} to {self.samples[1] - 1} of the training order"
            done += " are skipped" if self.action == "rewind" else " are in it"
        return text + again + done

    def answered(self, to_step: int | None, samples: tuple[int, int]) -> Spike:
        """Return a copy of this spike with ``to_step`` and ``samples`` filled in. ``to_step`` is the step of
        the checkpoint to which the run went back. If it is None, because there was no such checkpoint, the
        action ``rewind`` becomes ``skip``."""
        action = "skip" if self.action == "rewind" and to_step is None else self.action
        return replace(self, action=action, to_step=to_step, samples=samples)


class SpikeGuard:
    """Compares the loss and gradient norm of each step with the values of the last steps, and decides whether
    the weights may be updated. ``found`` is the spike of the current step, if there is one."""

    def __init__(self, options: SpikeConfig, any_rank: Callable[[bool], bool]) -> None:
        self._options, self._any_rank = options, any_rank
        self._losses: deque[float] = deque(maxlen=options.window)
        self._norms: deque[float] = deque(maxlen=options.window)
        self._in_a_row = 0
        self._rewinds: dict[int, int] = {}
        self._step = 0
        self.found: Spike | None = None

    def expect(self, step: int) -> None:
        self._step, self.found = step, None

    def judge(self, loss: float, grad_norm: float, repeat: Repeat) -> tuple[float, float, bool]:
        """Decide whether the weights may be updated in this step. Returns the loss to use, the gradient norm
        to use, and the decision. All ranks must call this.

        ``repeat`` computes the step again. It is called if the step is a spike and ``Engine.spike.replay`` is
        on. If its result is not a spike, that result is used.
        """
        spike = self._agreed_jump(loss, grad_norm)
        again: tuple[float, float] | None = None
        if spike is not None and self._options.replay:
            again = repeat()
            if self._agreed_jump(*again) is None:
                self.found = self._made(spike, loss, grad_norm, "repeated", again)
                loss, grad_norm = again
                spike = None
        if spike is not None:
            self.found = self._made(spike, loss, grad_norm, self._options.action, again)
            self._in_a_row += 1
            return loss, grad_norm, False
        self._losses.append(loss)
        self._norms.append(grad_norm)
        self._in_a_row = 0
        return loss, grad_norm, True

    @property
    def gives_up(self) -> bool:
        """Whether the run must end: more than ``Engine.spike.max_in_a_row`` steps in a row were spikes."""
        return self._in_a_row > self._options.max_in_a_row

    def stop_reason(self, spike: Spike) -> str:
        """Return why the run must end after this spike, as the end of a sentence; "" if the run continues.
        Must be called once per spike, because each call counts how often the run has gone back to a
        checkpoint."""
        if spike.to_step is not None:
            count = self._rewinds[spike.to_step] = self._rewinds.get(spike.to_step, 0) + 1
            if count > self._options.max_in_a_row:
                return f"; the run has gone back there {count - 1} times (Engine.spike.max_in_a_row)"
        elif self.gives_up:
            return f"; {self._in_a_row} steps in a row were spikes (Engine.spike.max_in_a_row)"
        return ""

    def state(self) -> dict[str, Any]:
        """Return the values of the last steps, and how many spikes in a row there were, as a JSON object. A
        resumed run that loads it detects the same spikes."""
        return {"losses": [*self._losses], "grad_norms": [*self._norms], "in_a_row": self._in_a_row}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state` returned. With an empty ``state``, there are no earlier values. The
        counts of how often the run has gone back to each checkpoint do not change."""
        self._losses = deque(state.get("losses", []), maxlen=self._options.window)
        self._norms = deque(state.get("grad_norms", []), maxlen=self._options.window)
        self._in_a_row = state.get("in_a_row", 0)

    def _agreed_jump(self, loss: float, grad_norm: float) -> str | None:
        """Return the name of the value that jumped, ``loss`` or ``grad_norm``; None if no value jumped on any
        rank. It is ``loss`` if both jumped, or if a value jumped only on other ranks. All ranks must call
        this."""
        what = None
        if self._jumps(grad_norm, self._norms, self._options.grad_norm_deviations):
            what = "grad_norm"
        if self._jumps(loss, self._losses, self._options.loss_deviations):
            what = "loss"
        # The values of the ranks may differ in the last bit. A jump that only other ranks saw counts as a
        # jump of the loss.
        return (what or "loss") if self._any_rank(what is not None) else None

    def _jumps(self, value: float, window: deque[float], deviations: float) -> bool:
        if not math.isfinite(value):
            return True
        if len(window) < self._options.min_steps or not deviations:
            return False
        middle, deviation = _spread(window)
        return value > middle + deviations * deviation

    def _made(
        self, what: str, loss: float, grad_norm: float, action: str, again: tuple[float, float] | None
    ) -> Spike:
        window = self._losses if what == "loss" else self._norms
        middle, deviation = _spread(window) if window else (None, None)
        repeated = again or (None, None)
        return Spike(self._step, what, loss, grad_norm, middle, deviation, action, *repeated)


def _spread(window: deque[float]) -> tuple[float, float]:
    middle = median(window)
    mad = median(abs(value - middle) for value in window)
    # Without this minimum, any change after nearly equal values would count as a spike.
    return middle, max(_MAD_TO_DEVIATION * mad, _LEAST_SHARE * abs(middle))


def _is_same(one: float, other: float) -> bool:
    if not (math.isfinite(one) and math.isfinite(other)):
        return math.isfinite(one) == math.isfinite(other)
    return abs(one - other) <= _SAME * max(abs(one), abs(other))
