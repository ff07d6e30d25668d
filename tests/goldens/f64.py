"""Let the parts of transformers that compute in float32 whatever the weights' type compute in float64.

Model code writes ``torch.float32``, ``torch.float`` and ``.float()``; inside ``with double(modules)`` these
mean float64, so that the goldens carry no rounding of single precision.
"""

import contextlib
import types

import torch


class _Torch64(types.ModuleType):
    float32 = torch.float64
    float = torch.float64

    def __getattr__(self, name):
        return getattr(torch, name)


@contextlib.contextmanager
def double(modules):
    fake = _Torch64("torch64")
    saved = [(m, m.torch) for m in modules if hasattr(m, "torch")]
    plain = torch.Tensor.float
    before = torch.get_default_dtype()
    try:
        for m, _ in saved:
            m.torch = fake
        torch.Tensor.float = lambda self: self.double()
        torch.set_default_dtype(torch.float64)
        yield
    finally:
        for m, t in saved:
            m.torch = t
        torch.Tensor.float = plain
        torch.set_default_dtype(before)
