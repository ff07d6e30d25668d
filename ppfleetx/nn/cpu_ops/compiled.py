"""Where compiled operators are. Does not import Paddle."""

from __future__ import annotations

from pathlib import Path

BUILT = Path(__file__).with_name("built")
HOW_TO_MAKE = "python -m ppfleetx.nn.cpu_ops"
NOT_COMPILED = f"operators are not compiled ({HOW_TO_MAKE} does that)"
"""Text for messages."""


def is_compiled(library: str) -> bool:
    """Return whether an operator library is compiled, perhaps for another version of Paddle."""
    return any(BUILT.glob(f"{library}-*.so"))
