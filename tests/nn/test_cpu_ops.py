"""Matrices in panels and our operators for decoding on a CPU: results, and behavior without the operators."""

import functools
import sys
import tomllib
from pathlib import Path

import numpy as np
import paddle
import pytest

from ppfleetx.config.errors import UserError
from ppfleetx.generation import logits_processors
from ppfleetx.nn import panel_matmul
from ppfleetx.nn.cpu_ops import build, compiled, ops
from ppfleetx.nn.panel_matmul import InferenceLinear, PanelMatrix, panels_of
from tests.helpers import programs

needs_operators = pytest.mark.skipif(
    not ops.are_available(), reason="the operators are not compiled (python -m ppfleetx.nn.cpu_ops)"
)


@needs_operators
@pytest.mark.parametrize("columns", [1, 15, 16, 48, 100, 600])
@pytest.mark.parametrize("size", [1, 7, 128, 131, 300])
def test_products_of_few_rows(columns: int, size: int) -> None:
    weight, bias = paddle.randn([size, columns]), paddle.randn([columns])
    cut = panels_of(weight).contiguous()
    exact_weight = weight.numpy().astype(np.float64)
    for shape in ([1], [3], [1, 4], [5, 1], [2, 4], [9], [31], [32], [33], [70]):
        x = paddle.randn([*shape, size])
        exact = x.numpy().astype(np.float64) @ exact_weight
        for own, added in ((None, 0), (bias, bias.numpy())):
            result = ops.few_rows(x, cut, own, columns).numpy()
            np.testing.assert_allclose(result, exact + added, rtol=1e-5, atol=1e-5 * size**0.5)


@needs_operators
def test_a_row_does_not_depend_on_the_rows_beside_it() -> None:
    cut, x = panels_of(paddle.randn([300, 100])).contiguous(), paddle.randn([40, 300])
    together = ops.few_rows(x, cut, None, 100).numpy()
    for count in (1, 2, 5, 8, 33):
        alone = ops.few_rows(x[:count], cut, None, 100).numpy()
        np.testing.assert_array_equal(alone, together[:count])


@needs_operators
def test_panels_of_another_matrix_are_refused() -> None:
    cut = panels_of(paddle.randn([8, 100])).contiguous()
    for size, columns, bias in ((9, 100, None), (8, 100, [99]), (8, 200, None), (8, 10, None)):
        added = None if bias is None else paddle.randn(bias)
        with pytest.raises(Exception, match="panels do not fit"):
            ops.few_rows(paddle.randn([2, size]), cut, added, columns)


@needs_operators
def test_linears_use_the_operator_for_few_rows_and_mkl_for_many(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = []

    def counted(x: paddle.Tensor, *rest: object) -> paddle.Tensor:
        rows.append(x.size // x.shape[-1])
        return few_rows(x, *rest)

    few_rows = ops.few_rows
    monkeypatch.setattr(panel_matmul.cpu_ops, "few_rows", counted)
    linear = InferenceLinear(8, 16, bias=True)
    with paddle.no_grad():
        for count in (1, 2, ops.MOST_ROWS, ops.MOST_ROWS + 1):
            linear(paddle.randn([1, count, 8]))
    assert rows == [2, ops.MOST_ROWS]


@pytest.mark.parametrize("width", [32, 48, 96, 100, 600])
@pytest.mark.parametrize("shape", [[1], [1, 2], [7, 3], [200, 3]])
@pytest.mark.parametrize("tile", [16, 48])
def test_products_of_panels_without_the_operator(
    width: int, shape: list[int], tile: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(panel_matmul, "WIDTH", tile)
    monkeypatch.setattr(panel_matmul.cpu_ops, "are_available", lambda: False)
    weight = paddle.randn([40, width])
    x = paddle.randn([*shape, 40])
    matrix = PanelMatrix(weight)
    result = matrix.linear(x).numpy()
    assert result.shape == (*shape, width)
    exact = x.numpy().astype(np.float64) @ weight.numpy().astype(np.float64)
    np.testing.assert_allclose(result, exact, rtol=1e-5, atol=1e-5)
    bias = paddle.randn([width])
    np.testing.assert_allclose(matrix.linear(x, bias).numpy(), exact + bias.numpy(), rtol=1e-5, atol=1e-5)
    assert (matrix._panels is None) == (shape in ([1], [200, 3]))


def test_no_copy_when_memory_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(panel_matmul, "available_fraction", lambda: 0.1)
    matrix = PanelMatrix(paddle.randn([8, 16]))
    assert matrix.linear(paddle.randn([4, 8])).shape == [4, 16]
    assert matrix._panels is None


def test_a_linear_that_has_gradients_keeps_them() -> None:
    linear = InferenceLinear(8, 16, bias=True)
    linear.bias.set_value(paddle.randn([16]))
    linear.weight.set_value(paddle.randn([8, 16]))
    x = paddle.randn([5, 8])
    with_gradients = linear(x)
    with_gradients.sum().backward()
    assert float(linear.weight.grad.abs().sum()) > 0
    with paddle.no_grad():
        np.testing.assert_allclose(linear(x).numpy(), with_gradients.numpy(), rtol=1e-5, atol=1e-6)


@needs_operators
@pytest.mark.parametrize("scale", [0.0, 0.001, 0.6, 3.0, 30.0, 300.0])
@pytest.mark.parametrize("vocab", [7, 300, 20011])
def test_nucleus_is_that_of_numpy(scale: float, vocab: int) -> None:
    logits = np.random.default_rng(3).normal(size=(5, vocab)).astype(np.float32) * scale
    probabilities = paddle.nn.functional.softmax(paddle.to_tensor(logits), axis=-1)
    for top_p in (1e-6, 0.1, 0.5, 0.9, 0.999):
        kept = ops.nucleus(probabilities, paddle.full([1], top_p)).numpy()
        rows = [logits_processors._nucleus_of_row(row, top_p) for row in probabilities.numpy()]
        # Sums are taken in another order, which may make a difference of one token.
        assert (np.count_nonzero(kept != np.stack(rows), axis=-1) <= (vocab > 1000)).all()
    everything = ops.nucleus(probabilities, paddle.full([1], 2.0))
    np.testing.assert_array_equal(everything.numpy(), probabilities.numpy())


@needs_operators
def test_nucleus_of_equal_ones_and_of_what_is_no_number() -> None:
    rows = paddle.to_tensor([[0.1, 0.2, 0.2, 0.3, 0.2], [1.0, 0.0, 0.0, 0.0, 0.0]])
    kept = ops.nucleus(rows, paddle.to_tensor([0.6])).numpy()
    np.testing.assert_array_equal(kept, np.float32([[0, 0.2, 0.2, 0.3, 0], [1, 0, 0, 0, 0]]))
    assert ops.nucleus(paddle.full([2, 9], np.nan), paddle.to_tensor([0.6])).shape == [2, 9]


@needs_operators
def test_top_p_with_and_without_the_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    probabilities = paddle.nn.functional.softmax(paddle.randn([3, 500]) * 2, axis=-1)
    with_operator = logits_processors.nucleus(probabilities, 0.8).numpy()
    monkeypatch.setattr(logits_processors.cpu_ops, "are_available", lambda: False)
    np.testing.assert_array_equal(logits_processors.nucleus(probabilities, 0.8).numpy(), with_operator)


def test_a_library_that_cannot_be_loaded_is_said_and_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    broken = tmp_path / "cpu_ops.so"
    broken.write_bytes(b"no library")
    monkeypatch.setattr(ops, "library_path", lambda _: broken)
    assert not ops.load.__wrapped__("ops")
    assert f"{broken} cannot be loaded" in caplog.text


def test_another_kind_of_machine_has_a_library_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    here = compiled.library_path("ops")
    monkeypatch.setattr(compiled, "read_cpuinfo", lambda: "flags : sse2")
    assert compiled.library_path("ops") != here


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("#!/bin/sh\nexit 3", "compiler failed with code 3"),
        (
            '#!/bin/sh\nfor last; do :; done; echo nothing > "$last"',
            "library made by .* cannot be loaded",
        ),
        ("", "cannot be started: Exec format error"),
        (None, "CXX names was not found"),
    ],
)
def test_a_compiler_that_makes_no_library(
    script: str | None, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler, library = tmp_path / "compiler", tmp_path / "built" / "cpu_ops.so"
    library.parent.mkdir()
    if script is not None:
        compiler.write_text(f"{script}\n")
        compiler.chmod(0o755)
    for module in (build, ops):
        monkeypatch.setattr(module, "library_path", lambda _: library)
    monkeypatch.setattr(build, "load", functools.cache(ops.load.__wrapped__))
    monkeypatch.setenv("CXX", f"{compiler} --some-option")
    with pytest.raises(UserError, match=message):
        build.build("ops")
    assert not any(library.parent.iterdir())


@pytest.mark.parametrize(("options", "code"), [([], 2), (["--if-possible"], 0)])
def test_the_command_where_nothing_can_be_compiled(options: list[str], code: int, tmp_path: Path) -> None:
    script = tmp_path / "compile.py"
    script.write_text(
        "import runpy, pathlib\n"
        "from ppfleetx.nn.cpu_ops import compiled\n"
        f"compiled.BUILT = pathlib.Path({str(tmp_path)!r}) / 'built'\n"
        "runpy.run_module('ppfleetx.nn.cpu_ops', run_name='__main__')\n"
    )
    environment = {"PATH": str(tmp_path), "HOME": str(tmp_path)}
    done = programs.run([sys.executable, str(script), *options], timeout=60, env=environment, cwd=tmp_path)
    assert done.returncode == code, done.stderr
    assert "no C++ compiler was found" in (done.stdout if options else done.stderr)
    assert "Traceback" not in done.stderr


def test_the_source_belongs_to_the_package() -> None:
    configuration = tomllib.loads((compiled.BUILT.parents[3] / "pyproject.toml").read_text())
    files = configuration["tool"]["setuptools"]["package-data"]["ppfleetx"]
    for source in (*compiled.SOURCES.values(), *compiled.BUILT.parent.glob("*.h")):
        path = source.relative_to(source.parents[2])
        assert any(path.match(pattern) for pattern in files), path
