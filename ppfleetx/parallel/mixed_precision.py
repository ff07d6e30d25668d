"""Mixed precision: 16-bit compute, float32 master weights, loss scaling.

At level O1, parameters and gradients are float32, and ``auto_cast`` runs the operations of its white list in
16 bits. At level O2, parameters and usually activations are 16-bit, and the optimizer updates float32 master
weights. On a CPU, both levels do the same: the operands of attention, and of matmuls with weights, are
rounded to bfloat16, and everything else is float32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import paddle

from ppfleetx.config.errors import ConfigError
from ppfleetx.config.sections.engine import MixedPrecisionConfig
from ppfleetx.distributed.device import has_kernels, on_card, on_gpu
from ppfleetx.nn.cpu_ops import bfloat16
from ppfleetx.nn.fused_ops import NO_FUSED_OPS, FusedOps
from ppfleetx.optims.gradients import add_to_main_gradient, gradient_of, scale_all
from ppfleetx.utils.log import get_logger

MIN_SCALE, GROWTH, BACKOFF = 1.0, 2.0, 0.5
# Text for messages: the compute capability that auto_cast requires of a GPU.
_NEEDS = {
    "float16": ", which needs compute capability 7.0",
    "bfloat16": ", which needs compute capability 8.0",
}


@dataclass
class LossScaler:
    """The loss scale for float16, with the rules of Megatron-LM (``optimizer/grad_scaler.py``).

    Attributes:
        window: number of steps without overflow after which the scale doubles.
        hysteresis: number of overflows after which the scale is halved. Until the scale doubles again, every
            further overflow also halves it.
        dynamic: whether the scale changes.
    """

    scale: float
    window: int = 1000
    hysteresis: int = 2
    dynamic: bool = True
    _quiet_steps: int = field(default=0, init=False)
    _tolerated: int = field(init=False)
    _min_scale: float = field(init=False)

    def __post_init__(self) -> None:
        self._tolerated, self._min_scale = self.hysteresis, min(MIN_SCALE, self.scale)

    @property
    def can_shrink(self) -> bool:
        """Whether the scale can become smaller. If it cannot, skipping a step with overflow does not help."""
        return self.dynamic and self.scale > self._min_scale

    def update(self, overflow: bool) -> None:
        """Set the loss scale for the next step. ``overflow`` is True if gradients of this step overflowed."""
        if not self.dynamic:
            return
        if overflow:
            self._quiet_steps = 0
            self._tolerated -= 1
            if self._tolerated <= 0:
                self.scale = max(self.scale * BACKOFF, self._min_scale)
            return
        self._quiet_steps += 1
        if self._quiet_steps >= self.window:  # greater after a resume with a shorter window
            self._quiet_steps, self._tolerated = 0, self.hysteresis
            self.scale *= GROWTH

    def state(self) -> dict[str, float | int]:
        return {"scale": self.scale, "quiet_steps": self._quiet_steps, "tolerated": self._tolerated}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore the loss scale from a checkpoint. A constant scale keeps its configured value."""
        if self.dynamic:
            self.scale, self._quiet_steps = float(state["scale"]), state["quiet_steps"]
            # A smaller hysteresis takes effect at once.
            self._tolerated = min(state["tolerated"], self.hysteresis)
            self._min_scale = min(self._min_scale, self.scale)


class Precision:
    """The mixed precision of a run, as configured in ``Engine.mix_precision``. Without a configuration,
    everything is float32.

    Attributes:
        scaler: the loss scaler; None if no loss scale is needed.
        matmuls_only: True on a CPU with bfloat16: attention and matmuls with weights use 16-bit operands, and
            everything else is float32.
        cached_casts: function that returns a context manager. Inside it, each weight is cast to 16 bits only
            once, so parameters must not change there.

    Raises:
        ConfigError: the device cannot compute in the configured dtype. If ``enable`` is ``auto``, the run
            computes in float32 instead.
    """

    def __init__(self, cfg: MixedPrecisionConfig | None = None) -> None:
        self._cfg = cfg = cfg or MixedPrecisionConfig()
        self.scaler: LossScaler | None = None
        self.cached_casts: Callable[[], AbstractContextManager[None]] = nullcontext
        self.matmuls_only = False
        if not cfg.enable:
            return
        has_all = has_kernels(cfg.dtype)
        self.matmuls_only = not has_all and bfloat16.serves(cfg.dtype)
        if not has_all and not self.matmuls_only:
            obstacle = f"{paddle.get_device()} does not compute in {cfg.dtype}{_why(cfg.dtype)}"
            if cfg.enable != "auto":
                raise ConfigError(
                    f"{obstacle}; -o Engine.mix_precision.enable=False computes in float32",
                    key="Engine.mix_precision.dtype",
                    value=cfg.dtype,
                )
            get_logger().info(
                f"the run computes in float32: {obstacle} (Engine.mix_precision.enable is auto)"
            )
            self._cfg = cfg.model_copy(update={"enable": False})
            return
        if cfg.dtype == "float16":
            self.scaler = LossScaler(
                cfg.scale_loss, cfg.incr_every_n_steps, cfg.hysteresis, cfg.use_dynamic_loss_scaling
            )

    @property
    def loss_scale(self) -> float:
        return 1.0 if self.scaler is None else self.scaler.scale

    @property
    def types(self) -> tuple[str, ...]:
        """The dtypes that activations can have: float32 and, with mixed precision on an accelerator, also the
        16-bit dtype."""
        has_both = self._cfg.enable and not self.matmuls_only
        return ("float32", self._cfg.dtype) if has_both else ("float32",)

    @property
    def lowers_parameters(self) -> bool:
        return bool(self._cfg.enable) and self._cfg.level == "O2" and not self.matmuls_only

    @contextmanager
    def autocast(self) -> Iterator[None]:
        """Context manager for forward passes. Inside it, the configured level and operation lists determine
        the dtype of each operation."""
        if not self._cfg.enable or (self.matmuls_only and self._cfg.matmuls_in_float32):
            yield
            return
        if self.matmuls_only:
            with bfloat16.autocast(), self.cached_casts():
                yield
            return
        # At O2, operations outside the lists run in the dtype of their inputs, and in float32 if these
        # differ.
        casts = paddle.amp.auto_cast(
            custom_white_list=self._cfg.custom_white_list or None,
            custom_black_list=self._cfg.custom_black_list or None,
            level=self._cfg.level,
            dtype=self._cfg.dtype,
        )
        with casts, self.cached_casts():
            yield

    def lower(self, parameters: Iterable[paddle.Tensor], *, train: bool) -> list[paddle.Tensor]:
        """At level O2, convert the parameters to 16 bits in place, except parameters that must stay float32
        or are quantized. Returns the parameters that need float32 master weights; none if ``train`` is False.
        Call this before the parameters have memory or hooks."""
        with_masters: list[paddle.Tensor] = []
        if not self.lowers_parameters:
            return with_masters
        for parameter in {id(parameter): parameter for parameter in parameters}.values():
            if getattr(parameter, "is_quantized", False):
                parameter.compute_dtype = self._cfg.dtype
                continue
            if parameter.info.kind == "quant" or parameter.spec.dtype == "float32":
                continue  # few numbers with small updates, which 16 bits would round away
            low = paddle.empty(parameter.shape, self._cfg.dtype)
            parameter.get_tensor()._share_data_with(low.get_tensor())
            parameter._clear_data()
            if not train or parameter.stop_gradient:
                continue
            with_masters.append(parameter)
            if self._cfg.main_grad_fp32:
                parameter.gradient_dtype = paddle.float32
                # This hook must run before all others.
                parameter._register_backward_hook(lambda *_, p=parameter: add_to_main_gradient(p))
        return with_masters

    @paddle.no_grad()
    def unscale(self, parameters: Sequence[paddle.Tensor], ops: FusedOps = NO_FUSED_OPS) -> None:
        """Divide gradients by the loss scale, in place, after their reduction. The result is float32."""
        if self.lowers_parameters:
            for parameter in parameters:
                add_to_main_gradient(parameter)  # gradients summed in 16 bits: main_grad_fp32 is off
        if self.loss_scale != 1.0:
            found = [gradient_of(parameter) for parameter in parameters]
            gradients = [gradient for gradient in found if gradient is not None]
            scale_all(gradients, 1.0 / self.loss_scale, ops)


def _why(dtype: str) -> str:
    if on_gpu():
        return _NEEDS[dtype]
    return "" if on_card() else f": {bfloat16.obstacle(dtype)}"
