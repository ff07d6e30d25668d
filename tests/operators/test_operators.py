"""A few runs use no kernel that a GPU lacks. ``make operators`` checks all runs."""

import json

import numpy as np
import pytest

from tests.helpers.low_precision import emulated
from tests.operators import table
from tests.operators.scenarios import CASES, few
from tests.operators.table import arguments_of, unknown, write_runs

CURE = "python -m tests.operators table, and docs/gpu.md"


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    return write_runs(tmp_path_factory.mktemp("runs"))


@pytest.mark.slow_after(3)
@pytest.mark.parametrize("scenario", [*few()], ids=lambda scenario: scenario.name)
def test_only_kernels_of_the_table_run(pools, runs, scenario):
    found = pools(scenario.world).run(CASES + scenario.case, **arguments_of(scenario, runs))
    seen = {(kernel, dtype) for rank in found for kernel, dtype in rank}
    assert len(seen) > 40, "nothing was recorded"
    assert not unknown(seen), f"{scenario.name}: {'; '.join(unknown(seen))} ({CURE})"


def test_a_kernel_that_is_not_in_the_table_is_named():
    found = [("gelu", "float32"), ("gelu", "int64"), ("eigvalsh", "float32")]
    assert unknown(found) == [
        "eigvalsh float32 is not in the table",
        "gelu int64 is not in the table",
    ]


def test_what_no_gpu_is_known_to_have_is_not_written(tmp_path, monkeypatch):
    file = tmp_path / "table.json"
    kernels = {"gelu": {"used": ["float32"], "gpu": ["float16", "float32"]}}
    file.write_text(json.dumps({"about": "x", "kernels": kernels}))
    monkeypatch.setattr(table, "TABLE", file)
    registry = tmp_path / "registry.json"
    registry.write_text(json.dumps({"relu": ["float32"]}))
    found = [("gelu", "float16"), ("gelu", "int8"), ("relu", "float32"), ("eigvalsh", "float32")]
    assert table.write(found, {"gpu": registry}) == ["eigvalsh float32", "gelu int8"]
    assert json.loads(file.read_text())["kernels"] == {
        "gelu": {"used": ["float16", "float32"], "gpu": ["float16", "float32"]},
        "relu": {"used": ["float32"], "gpu": ["float32"], "npu": []},
    }
    assert table.write([], {"npu": registry}) == []
    assert json.loads(file.read_text())["kernels"]["relu"]["npu"] == ["float32"]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_what_works_in_place_on_16_bits_is_emulated(dtype):
    """The emulation computes in float32 and rounds into the same memory, also for lists of tensors."""
    import paddle

    with emulated():
        x, y = (paddle.to_tensor(values).astype(dtype) for values in ([1.5, 2.25, -3.0], [1.01, 0.5, 3.0]))
        place = x.data_ptr()
        expected = (x.astype("float32") * y.astype("float32")).astype(dtype).astype("float32").numpy()
        assert x.multiply_(y) is x and x.data_ptr() == place
        np.testing.assert_array_equal(x.astype("float32").numpy(), expected)
        scaled, found = paddle._C_ops.check_finite_and_unscale_([x, y], paddle.full([1], 2.0))
        assert scaled[0] is x and not bool(found) and x.dtype == getattr(paddle, dtype)
        np.testing.assert_array_equal(x.astype("float32").numpy(), expected / 2)
        leaf = paddle.ones([3]).astype(dtype)
        leaf.stop_gradient = False
        with pytest.raises(AssertionError, match="a 16-bit tensor that is differentiated"):
            (leaf * 1.0).multiply_(y)
