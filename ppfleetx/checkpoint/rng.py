"""States of random number generators as JSON, without pickle.

Python's and NumPy's generators give theirs as numbers. Paddle's `GeneratorState` gives seed, offset and
the text form of its mt19937-64 engine through `__getstate__`, and takes them back.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np

from ppfleetx.config.errors import CheckpointError

# Words of the Mersenne twisters' states: NumPy's of 32 bits, Paddle's of 64 bits and its position.
_NUMPY_KEYS, _PADDLE_ENGINE_WORDS = 624, 312


def rng_state() -> dict[str, Any]:
    """State of Python's, NumPy's and Paddle's default generators, JSON-able."""
    version, words, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state()
    return {
        "python": {"version": version, "words": list(words), "gauss": gauss},
        "numpy": {
            "name": name,
            "keys": keys.tolist(),
            "position": position,
            "has_gauss": has_gauss,
            "cached": cached,
        },
        "paddle": _paddle_state(),
    }


def set_rng_state(state: Mapping[str, Any]) -> None:
    """Restore what `rng_state` gave. Raises CheckpointError when it is not such a state."""
    try:
        python, numpy = state["python"], state["numpy"]
        random.setstate((python["version"], tuple(python["words"]), python["gauss"]))
        keys = np.array(numpy["keys"], dtype=np.uint32)
        if keys.shape != (_NUMPY_KEYS,):
            raise ValueError(f"NumPy's generator has {keys.size} words instead of {_NUMPY_KEYS}")
        np.random.set_state(
            (numpy["name"], keys, numpy["position"], numpy["has_gauss"], numpy["cached"]),
        )
        _set_paddle_state(state["paddle"])
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise CheckpointError(
            f"the random number generators in the checkpoint cannot be restored ({error}); "
            "set Engine.save_load.load_rng to False to go on without"
        ) from error


def _paddle_state() -> dict[str, Any]:
    import paddle

    default = [_encode(state) for state in paddle.get_rng_state()]
    return {"device": paddle.device.get_device().split(":")[0], "default": default}


def _set_paddle_state(saved: Mapping[str, Any]) -> None:
    import paddle

    device = paddle.device.get_device().split(":")[0]
    if saved["device"] != device:
        raise ValueError(f"they are those of device {saved['device']}, this one is {device}")
    paddle.set_rng_state([_decode(entry) for entry in saved["default"]])


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
