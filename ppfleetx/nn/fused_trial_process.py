"""Run trials of fused operators in a child process, because a faulty operator can crash the process or break
the device."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import paddle

from ppfleetx.config.registry import load_target
from ppfleetx.distributed.device import tf32_disabled
from ppfleetx.resilience.progress import PROGRESS

_SECONDS = 120.0  # timeout of one child, which imports Paddle and runs a few kernels
_READY, _SAID = "trials: ready", "trial: "  # the child's output lines that the parent reads
_CARD_LOST = 70  # exit code of a child whose device stopped working

Pairs = Iterable[tuple[paddle.Tensor, paddle.Tensor]]
"""The results of a trial: pairs (fused result, unfused result)."""
Trial = tuple[str, str]
"""A trial: (``module:function``, element type)."""


def tried_in_child(trials: Sequence[Trial], device: str, flags: Mapping[str, Any]) -> list[str | None]:
    """Run ``trials``, which compare fused operators with plain ones, in a child process. Return one item per
    trial, in order: a description of the failure, or None if the results agree. After a crash, a new child
    runs the remaining trials. ``device`` includes its number, for example ``gpu:0``."""
    found: list[str | None] = []
    while len(found) < len(trials):
        PROGRESS.go_on()
        left = trials[len(found) :]
        is_ready, said, end = _child(left, device, flags)
        found += said
        if len(said) == len(left):
            break
        if not is_ready:
            found += [f"no trial could run: {end}"] * len(left)
        elif end:
            found.append(f"its trial in {left[len(said)][1]} {end}")
    return found


def _child(
    trials: Sequence[Trial], device: str, flags: Mapping[str, Any]
) -> tuple[bool, list[str | None], str]:
    """Run trials in one child process.

    Returns:
        Whether the child was ready to run trials; the results of the trials that it finished; and a
            description of its crash or timeout ("" if there was none).
    """
    command = [sys.executable, "-m", __name__, json.dumps([trials, device, dict(flags)])]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [os.getcwd(), *sys.path]))}  # noqa: PTH109
    try:
        child = subprocess.run(
            command, env=environ, stdin=subprocess.DEVNULL, capture_output=True, timeout=_SECONDS, check=False
        )
        out, end = child.stdout, _end_of(child.returncode, child.stderr)
    except subprocess.TimeoutExpired as late:
        out, end = late.stdout or b"", f"did not end within {_SECONDS:g} s"
    lines = out.decode(errors="replace").splitlines()
    said = [json.loads(line.removeprefix(_SAID)) for line in lines if line.startswith(_SAID)]
    return _READY in lines, said, end


def _end_of(code: int, errors: bytes) -> str:
    if code in (0, _CARD_LOST):
        return ""
    if code < 0:
        return f"crashed its process ({signal.Signals(-code).name})"
    lines = errors.decode(errors="replace").strip().splitlines()
    return f"crashed its process (exit code {code}{': ' if lines else ''}{''.join(lines[-1:])})"


def difference(trial: Callable[[str], Pairs], dtype: str) -> str | None:
    """Run a trial. Return None if the fused and the plain results agree within tolerance. Otherwise, return a
    message with the largest difference, or with the error that the trial raised."""
    epsilon = float(paddle.finfo(getattr(paddle, dtype)).eps)
    allowed = epsilon * (64 if dtype == "float32" else 8)
    try:
        with tf32_disabled():
            pairs = [
                [value.astype("float32").numpy().astype(np.float64) for value in p] for p in trial(dtype)
            ]
        for one, other in pairs:
            error = float(np.abs(one - other).max() / np.abs(other).max())
            if one.shape != other.shape or not error <= allowed:
                return f"its trial in {dtype} differs from plain operators by {error:.1e}"
    except (RuntimeError, ValueError, TypeError, AttributeError, OSError, MemoryError) as error:
        return f"its trial in {dtype} failed: {_first_line(error)}"
    return None


def _first_line(error: BaseException) -> str:
    """Return the first informative line of an error message. Empty lines and the lines that Paddle
    adds around the message are skipped."""
    lines = [line.strip() for line in str(error).splitlines()]
    said = [line for line in lines if line not in ("", "{", "(External)") and not line.startswith("===")]
    return said[0] if said else type(error).__name__


def main(arguments: Sequence[str]) -> int:
    trials, device, flags = json.loads(arguments[0])
    paddle.set_flags(flags)
    paddle.set_device(device)
    paddle.zeros([1]).numpy()
    print(_READY, flush=True)
    for place, dtype in trials:
        wrong = difference(load_target(place), dtype)
        print(_SAID + json.dumps(wrong), flush=True)
        if wrong is not None and not _card_answers():
            return _CARD_LOST
    return 0


def _card_answers() -> bool:
    try:
        paddle.zeros([1]).numpy()
    except (RuntimeError, OSError, MemoryError):
        return False
    return True


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    os._exit(code)  # with a lost card, the libraries' own shutdown can hang
