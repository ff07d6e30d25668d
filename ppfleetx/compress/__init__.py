"""Make models smaller: quantisation, pruning, distillation."""

from typing import Literal

Criterion = Literal["l1_norm", "l2_norm", "saliency"]
"""The measure of the importance of heads and units in :mod:`~ppfleetx.compress.prune`."""
Part = Literal["heads", "mlp", "both"]
"""The kind of parts to prune."""
