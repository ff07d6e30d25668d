"""Products with matrices of 8 and 4 bits against float64, on random shapes and values.

The suite runs a few; all ten thousand, in the form for this CPU, in that for AVX2, in that without special
instructions, and under the sanitizers of GCC:

    python -m tests.nn.quantized_products --cases 10000
    python -m tests.nn.quantized_products --cases 10000 --march haswell --width 16
    python -m tests.nn.quantized_products --cases 2000 --march x86-64 --width 16
    export LD_PRELOAD="$(gcc -print-file-name=libasan.so) $(gcc -print-file-name=libubsan.so)"
    export ASAN_OPTIONS=detect_leaks=0:alloc_dealloc_mismatch=0
    python -m tests.nn.quantized_products --cases 1000 --sanitize
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import numpy as np
import paddle

from ppfleetx.nn.cpu_ops import build, compiled, ops, quantized

TOLERANCE = 2e-6
"""Of the sum of magnitudes of what is added up; stated in ``ppfleetx/nn/cpu_ops/quantized.py``."""
_SMALLEST = np.finfo(np.float32).tiny
_GROUPS = (8, 16, 24, 64, 128)


def pack(levels: np.ndarray) -> np.ndarray:
    nibbles = (levels & 15).astype(np.uint8)
    return nibbles[0::2] | (nibbles[1::2] << 4)


def check_case(rng: np.random.Generator) -> None:
    """One product of each kind, compared with float64.

    Raises:
        AssertionError: it differs by more than :data:`TOLERANCE`.
    """
    size, columns, rows = (int(rng.integers(1, most)) for most in (400, 260, 41))
    rows = 1 if rng.random() < 0.3 else rows
    bits = int(rng.choice([8, 4]))
    groups = 1
    if bits == 4 or rng.random() < 0.3:
        group = int(rng.choice(_GROUPS))
        groups = max(1, size // group)
        size = groups * group
    x, levels, scales, bias = _values(rng, size, columns, rows, groups, bits)
    _check_float(x, levels, scales, bias, bits)
    _check_integers(x, levels, scales, bias, bits)
    levels[rng.random(levels.shape) < 0.1] = -(1 << (bits - 1))  # which only grids with offsets have
    _check_float(x, levels, _with_offsets(rng, scales), bias, bits)
    _check_integers(x, levels, _with_offsets(rng, scales), bias, bits)


def _values(rng: np.random.Generator, size: int, columns: int, rows: int, groups: int, bits: int) -> tuple:
    largest = (1 << (bits - 1)) - 1
    levels = rng.integers(-largest, largest + 1, (size, columns)).astype(np.int8)
    x = rng.standard_normal((rows, size)).astype(np.float32)
    scales = np.exp(rng.uniform(-12, 2, (groups, columns))).astype(np.float32)
    kind = rng.integers(0, 8)
    if kind == 0:  # extremes
        x *= np.float32(1e15)
        scales *= np.float32(1e12)
        levels[rng.random(levels.shape) < 0.5] = largest
    elif kind == 1:  # denormals and zeros
        x *= np.float32(1e-41)
        x[rng.random(x.shape) < 0.3] = 0
    elif kind == 2:
        x[:] = 0
        scales[:] = _SMALLEST
    elif kind == 3:  # one large number among small ones
        x[:, rng.integers(0, size)] = 3e4
        levels[rng.random(levels.shape) < 0.9] = 0
    bias = None if rng.random() < 0.5 else rng.standard_normal(columns).astype(np.float32)
    return x, levels, scales, bias


def _with_offsets(rng: np.random.Generator, scales: np.ndarray) -> np.ndarray:
    """Scales and offsets in turn, in 16 bits. Offsets have either sign and may be denormal or 0."""
    scales = np.clip(scales, 1e-7, 6e4)
    offsets = scales * rng.uniform(-9, 9, scales.shape)
    return np.stack([scales, offsets.clip(-6e4, 6e4)], axis=1).reshape(-1, scales.shape[1]).astype(np.float16)


def _check_float(x, levels, scales, bias, bits: int) -> None:
    got = _product(x, levels, scales, bias, bits, rounds=False)
    steps, offsets = (
        np.repeat(one.astype(np.float64), len(levels) // len(one), axis=0) for one in _apart(scales)
    )
    weight = levels * steps + offsets
    # The product with the integers and that of the offsets are rounded each for itself.
    parts = np.abs(levels * steps) + np.abs(offsets)
    wide = x.astype(np.float64)
    start = 0.0 if bias is None else bias.astype(np.float64)
    # Where a CPU takes denormals for zero, that many of the smallest number may be missing.
    room = TOLERANCE * (np.abs(wide) @ parts + np.abs(start))
    room += _SMALLEST * (parts.sum(axis=0) + len(levels))
    assert (np.abs(got - (wide @ weight + start)) <= room).all(), (x.shape, levels.shape, scales.shape, bits)


def _check_integers(x, levels, scales, bias, bits: int) -> None:
    got = _product(x, levels, scales, bias, bits, rounds=True)
    scales, offsets = _apart(scales)
    exact = np.zeros(got.shape) if bias is None else np.broadcast_to(bias, got.shape).astype(float)
    magnitude, room = exact, 0.0
    groups = np.split(x, len(scales), axis=1), np.split(levels.astype(float), len(scales))
    for part, weights, scale, offset in zip(*groups, scales, offsets, strict=True):
        steps = np.maximum(np.abs(part).max(axis=1, keepdims=True) / np.float32(127), _SMALLEST)
        integers = np.rint(np.clip(part / steps, -127, 127)).astype(np.float64)
        step, scale, offset = (one.astype(np.float64) for one in (steps, scale, offset))
        product = integers @ weights * step * scale
        moved = integers.sum(axis=1, keepdims=True) * step * offset
        exact = exact + product + moved
        magnitude = np.abs(magnitude) + np.abs(product) + np.abs(moved)
        # An activation between two integers may go to either: one step of one weight, of the few there are.
        near = (np.abs(np.abs(part / steps) % 1 - 0.5) < 1e-5).astype(np.float64)
        room = room + near @ np.abs(weights * scale + offset) * step
    room = room + TOLERANCE * magnitude
    room = room + _SMALLEST * (len(levels) * 127**2 * (1 + float(np.abs(offsets).max())))
    assert (np.abs(got - exact) <= room).all(), (x.shape, levels.shape, scales.shape, f"int{bits} x int8")


def _apart(scales: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Scales and offsets. Only those in 16 bits have offsets."""
    return (scales[0::2], scales[1::2]) if scales.dtype == np.float16 else (scales, 0 * scales)


def _product(x, levels, scales, bias, bits: int, *, rounds: bool) -> np.ndarray:
    """What our operator computes. With ``rounds``, it also rounds ``x`` to 8 bits."""
    if bits == 4:
        panels = quantized.int4_panels(paddle.to_tensor(pack(levels)))
    else:
        panels = (quantized.int8_quads if rounds else quantized.int8_panels)(paddle.to_tensor(levels))
    kind = f"int{bits}_int8" if rounds else f"int{bits}"
    added = None if bias is None else paddle.to_tensor(bias)
    of_panels = quantized.scale_panels(paddle.to_tensor(scales))
    operands = paddle.to_tensor(x), panels.contiguous(), of_panels.contiguous()
    return quantized.product(kind, *operands, added, levels.shape[1]).numpy()


def _build(march: str, width: int, sanitize: bool, directory: Path) -> None:
    options = [f"-march={march}" if option.startswith("-march") else option for option in compiled.OPTIONS]
    options = [f"-DPANEL_WIDTH={width}" if option.startswith("-DPANEL") else option for option in options]
    if sanitize:
        options += ["-g", "-O1", "-fsanitize=address,undefined"]
        options += ["-fno-sanitize=vptr", "-fno-sanitize-recover=undefined"]
    library = directory / "quantized.so"
    ops.library_path = lambda _: library
    build.OPTIONS = tuple(options)
    for command in build._commands(build.find_compiler(), compiled.SOURCES["quantized"], library):
        build._run([*command, "-fsanitize=address,undefined"] if sanitize else command)
    quantized.WIDTH = width
    assert ops.load("quantized")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--march", default="native")
    parser.add_argument("--width", type=int, default=0)
    parser.add_argument("--sanitize", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        if args.march != "native" or args.sanitize:
            _build(args.march, args.width or compiled.WIDTH, args.sanitize, Path(directory))
        else:
            assert quantized.are_available(), "python -m ppfleetx.nn.cpu_ops compiles the operators"
        rng = np.random.default_rng(args.seed)
        for _ in range(args.cases):
            check_case(rng)
    print(f"{args.cases} cases: all within {TOLERANCE:g}")


if __name__ == "__main__":
    main()
