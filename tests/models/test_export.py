"""The same model exports with dynamic batch and length, and the program gives the same numbers."""

import numpy as np
import paddle
import pytest
from paddle.static import InputSpec

from tests.models.gpt_builders import VARIANTS, build, random_tokens, tiny_config


class Exported(paddle.nn.Layer):
    """Tracing changes the layer, so it gets this wrapper."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, tokens, position_ids, document_start):
        return self.model(tokens, position_ids, document_start)


class TokensOnly(Exported):
    def forward(self, tokens):
        return self.model(tokens)


@pytest.mark.slow_after(4)
@pytest.mark.parametrize(
    ("variant", "packed"), [(name, False) for name in VARIANTS] + [("gpt2", True), ("llama", True)]
)
def test_exported_program_equals_dynamic_mode(tmp_path, variant, packed):
    keys = VARIANTS[variant]
    model = build(tiny_config(num_layers=1, **keys))
    model.eval()
    tokens = random_tokens(3, 10)
    inputs = [tokens]
    specs = [InputSpec([None, None], "int64", "tokens")]
    if packed:
        positions = paddle.to_tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4, 5]] * 3)
        inputs += [positions, paddle.to_tensor([[0] * 4 + [4] * 6] * 3, dtype="int32")]
        specs += [InputSpec([None, None], "int64", "positions"), InputSpec([None, None], "int32", "starts")]
    expected = model(*inputs).numpy()
    wrapped = (Exported if packed else TokensOnly)(model)
    wrapped.eval()
    static = paddle.jit.to_static(wrapped, input_spec=specs, full_graph=True)
    paddle.jit.save(static, str(tmp_path / "model"))
    loaded = paddle.jit.load(str(tmp_path / "model"))
    np.testing.assert_allclose(loaded(*inputs).numpy(), expected, rtol=0, atol=1e-6)
