"""Make models smaller: quantization, pruning and distillation."""

from typing import Literal

Criterion = Literal["l1_norm", "l2_norm", "saliency", "usage"]
"""Importance measures for pruning. ``saliency`` applies only to attention heads and feed-forward units,
``usage`` only to experts."""
Part = Literal["heads", "mlp", "both", "experts"]
"""What to prune; ``both`` means ``heads`` and ``mlp``."""
