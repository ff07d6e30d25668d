"""Names of the fused operators that ``Model.fused_ops`` may list.

:mod:`ppfleetx.nn.fused` has the table: what each does, and where it can run.
"""

from __future__ import annotations

from typing import Literal

FusedName = Literal[
    "adamw",
    "grad_norm",
    "grad_scale",
    "rms_norm",
    "rope",
    "swiglu",
    "causal_softmax",
    "packed_attention",
    "plugin_attention",
    "linear_grad_add",
    "weight_cast",
]
