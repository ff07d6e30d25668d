"""Save and restore the states of random number generators, for one process and for all ranks of a job. The
states are JSON."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np

from ppfleetx.config.errors import CheckpointError
from ppfleetx.config.message_text import counted
from ppfleetx.config.parallel_plan import AXES
from ppfleetx.distributed.context import ParallelContext
from ppfleetx.distributed.coordination import gather
from ppfleetx.distributed.random import stream_tracker
from ppfleetx.utils.log import get_logger

_PADDLE_ENGINE_WORDS = 312  # 64-bit words of a Mersenne Twister, without the position that follows them
_NUMPY_PARTS = ("name", "keys", "position", "has_gauss", "cached")
_REFUSAL = "; set Engine.save_load.load_rng to False to go on without"


def gather_rng_state(ctx: ParallelContext) -> dict[str, Any]:
    """Collect the generator states of all ranks for a checkpoint. All ranks must call this; all get the same
    result."""
    first, *_ = states = gather(ctx, rng_state())
    ranks = [
        {
            "at": ctx.plan.coordinates(rank),
            "differs": {part: value for part, value in state.items() if value != first[part]},
        }
        for rank, state in enumerate(states)
    ]
    return {"rng": first, "rng_of_ranks": {"degrees": _degrees(ctx), "ranks": ranks}}


def restore_rng_state(state: Mapping[str, Any], ctx: ParallelContext) -> bool:
    """Restore this rank's generators from a checkpoint's ``state``, which contains the result of
    `gather_rng_state`. Returns whether the checkpoint was saved with the parallel degrees of ``ctx``.

    If so, each rank gets its own states. Otherwise, all ranks get the states of rank 0, except the named
    streams of Paddle's RNG tracker, which are not restored.

    If the kind or number of devices has changed, Paddle's generators are left unchanged, with a warning.
    Raises CheckpointError if a state is missing or invalid.
    """
    rank_0, of_ranks = state.get("rng", {}), state.get("rng_of_ranks")
    if not isinstance(of_ranks, Mapping) or of_ranks.get("degrees") != _degrees(ctx):
        # Dropout stays the same, because its masks depend only on seed and step.
        set_rng_state(rank_0, streams=False)
        return False
    at = ctx.plan.coordinates(ctx.rank)
    try:
        differs = next(entry["differs"] for entry in of_ranks["ranks"] if entry["at"] == at)
        mine = {**rank_0, **differs}
    except (StopIteration, KeyError, TypeError) as error:
        raise CheckpointError(
            f"the checkpoint lacks the random number generators of rank {ctx.rank}{_REFUSAL}"
        ) from error
    set_rng_state(mine)
    return True


def _degrees(ctx: ParallelContext) -> dict[str, int]:
    return {axis: ctx.size_of(axis) for axis in AXES}


def rng_state() -> dict[str, Any]:
    """Return the states of this process's generators as JSON values: Python's, NumPy's, Paddle's default
    generators, and the named streams of Paddle's RNG tracker."""
    version, words, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state()
    return {
        "python": {"version": version, "words": list(words), "gauss": gauss},
        "numpy": dict(zip(_NUMPY_PARTS, (name, keys.tolist(), position, has_gauss, cached), strict=True)),
        "paddle": _paddle_state(),
    }


def set_rng_state(state: Mapping[str, Any], *, streams: bool = True) -> None:
    """Restore the generators of this process: Python's, NumPy's and Paddle's. If ``state`` was saved with
    another kind or number of devices, Paddle's generators are left unchanged, with a warning. Raises
    CheckpointError if ``state`` is invalid.

    Args:
        state: the result of `rng_state`.
        streams: whether to restore the named streams of Paddle's RNG tracker, too.
    """
    try:
        python, numpy = state["python"], state["numpy"]
        random.setstate((python["version"], tuple(python["words"]), python["gauss"]))
        np.random.set_state(tuple(numpy[part] for part in _NUMPY_PARTS))
        _set_paddle_state(state["paddle"], streams=streams)
    except (LookupError, TypeError, ValueError, OverflowError) as error:
        raise CheckpointError(
            f"the random number generators in the checkpoint cannot be restored ({error}){_REFUSAL}"
        ) from error


def _paddle_state() -> dict[str, Any]:
    import paddle

    streams = stream_tracker().get_states_tracker()
    return {
        "device": _device(),
        "default": [_encode(state) for state in paddle.get_rng_state()],
        "tracker": {name: [_encode(state) for state in states] for name, states in streams.items()},
    }


def _set_paddle_state(saved: Mapping[str, Any], *, streams: bool) -> None:
    import paddle

    default = [_decode(entry) for entry in saved["default"]]
    tracked = {name: [_decode(entry) for entry in s] for name, s in saved.get("tracker", {}).items()}
    then, now = (saved["device"], len(default)), (_device(), len(paddle.get_rng_state()))
    if then != now:
        get_logger().warning(
            f"generators: the checkpoint has Paddle's of {_devices(*then)}, this process sees "
            f"{_devices(*now)}; they stay as Global.seed made them (dropout does not depend on them)"
        )
        return
    if streams:  # first, because this changes the default generators
        tracker = stream_tracker()
        # An earlier run in the same process, with another plan, may have left streams behind.
        known = tracker.get_states_tracker().keys() & tracked.keys()
        tracker.set_states_tracker({name: tracked[name] for name in known})
    paddle.set_rng_state(default)


def _device() -> str:
    import paddle

    return paddle.device.get_device().split(":")[0]


def _devices(kind: str, count: int) -> str:
    return "the cpu" if kind == "cpu" else counted(count, kind)


def _encode(state: Any) -> dict[str, Any]:
    device, seed, offset, engine = state.__getstate__()
    return {"device": device, "seed": seed, "offset": offset, "engine": bytes(engine).decode("ascii")}


def _decode(entry: Mapping[str, Any]) -> Any:
    from paddle.base import libpaddle

    words = [int(word) for word in entry["engine"].split(" ") if word]
    if len(words) != _PADDLE_ENGINE_WORDS + 1 or not all(0 <= word < 2**64 for word in words):
        raise ValueError("Paddle's generator has an engine of another kind")
    state = libpaddle.GeneratorState.__new__(libpaddle.GeneratorState)
    engine = list(entry["engine"].encode("ascii"))
    state.__setstate__((entry["device"], entry["seed"], entry["offset"], engine))
    return state
