"""ppfleetx: pretrain, finetune, evaluate, generate with, export and serve GPT models on PaddlePaddle fleet.

    import ppfleetx

    model = ppfleetx.load("output")
    print(model.generate("Once upon a time").text)

Importing the package is fast: each name is imported from its module on first use, and Paddle only with the
first name that needs it. docs/api.md describes the names.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ppfleetx.api.fleetx_module import build_module
    from ppfleetx.api.mindformers_gpt2 import GPT2LMHeadModel, GPT2Tokenizer
    from ppfleetx.api.model import GPT, load
    from ppfleetx.api.trainer import Trainer
    from ppfleetx.config.loader import load_config
    from ppfleetx.core.engine.callbacks.base import Callback
    from ppfleetx.data.tokenizer.tokenizer import Tokenizer

__version__ = "0.1.0"
__all__ = [
    "GPT",
    "Callback",
    "GPT2LMHeadModel",
    "GPT2Tokenizer",
    "Tokenizer",
    "Trainer",
    "build_module",
    "load",
    "load_config",
]

_PLACES = {
    "Callback": "ppfleetx.core.engine.callbacks.base",
    "GPT": "ppfleetx.api.model",
    "GPT2LMHeadModel": "ppfleetx.api.mindformers_gpt2",
    "GPT2Tokenizer": "ppfleetx.api.mindformers_gpt2",
    "Tokenizer": "ppfleetx.data.tokenizer.tokenizer",
    "Trainer": "ppfleetx.api.trainer",
    "build_module": "ppfleetx.api.fleetx_module",
    "load": "ppfleetx.api.model",
    "load_config": "ppfleetx.config.loader",
}


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_PLACES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
