"""TF32: float32 matrix products on NVIDIA GPUs from Ampere on, with inputs rounded to 10 bits of mantissa."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import paddle
from paddle.base import core

OVERRIDE = "NVIDIA_TF32_OVERRIDE"
"""If this variable is "0", NVIDIA's libraries never use TF32, whatever a program asks for."""

# Paddle has had these switches since 2.0; in a GPU build with these flags, the flags decide.
_FLAGS = ("FLAGS_cublas_allow_tf32", "FLAGS_cudnn_allow_tf32")


@contextmanager
def exact_products() -> Iterator[None]:
    cublas, cudnn = core.get_cublas_switch(), core.get_cudnn_switch()
    flags = {flag: paddle.get_flags(flag)[flag] for flag in _FLAGS if flag in core.globals()}
    allow_tf32(False)
    try:
        yield
    finally:
        core.set_cublas_switch(cublas)
        core.set_cudnn_switch(cudnn)
        paddle.set_flags(flags)


def allow_tf32(allowed: bool) -> str:
    """Set whether cuBLAS and cuDNN may use TF32 in this process; return a line for the log.

    This may be called again at any time: Paddle reads the setting for each product.
    """
    core.set_cublas_switch(allowed)
    core.set_cudnn_switch(allowed)
    for flag in _FLAGS:
        if flag in core.globals():
            paddle.set_flags({flag: allowed})
    theirs = os.environ.get(OVERRIDE)
    if theirs is not None and (theirs != "0") != allowed:
        state = "off" if theirs == "0" else "on"
        return f"float32 matrix products: TF32 is {state}, {OVERRIDE}={theirs} overrides Global.allow_tf32"
    if allowed:
        return "float32 matrix products: rounded to TF32 where the GPU can (Global.allow_tf32 = True)"
    return "float32 matrix products: exact, without TF32 (Global.allow_tf32 = False)"
