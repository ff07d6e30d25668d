"""What single operators are compared, told without importing Paddle."""

from __future__ import annotations

from ppfleetx.config.registries import ACTIVATIONS, NORMS

PLAIN = ("linear", "linear without bias", "embedding", "rope", "attention", "loss")


def operator_names() -> tuple[str, ...]:
    """Of ``tests/device/cases/numbers.py``. A new norm or activation is here by itself."""
    norms = (f"norm {name}" for name in NORMS.names())
    return (*PLAIN, *norms, *(f"activation {name}" for name in ACTIVATIONS.names()))
