"""Make models smaller: quantisation, pruning, distillation."""

from typing import Literal

Criterion = Literal["l1_norm", "l2_norm", "saliency"]
"""What :mod:`~ppfleetx.compress.prune` measures the importance of heads and units by."""
Part = Literal["heads", "mlp", "both"]
"""What it prunes."""
