"""Make models smaller: quantization, pruning, distillation."""

from typing import Literal

Criterion = Literal["l1_norm", "l2_norm", "saliency", "usage"]
"""The measure of the importance of heads and units (not usage) in :mod:`~ppfleetx.compress.prune`, and of
experts (not saliency) in :mod:`~ppfleetx.compress.prune_experts`."""
Part = Literal["heads", "mlp", "both", "experts"]
"""The kind of parts to prune; both: heads and mlp."""
