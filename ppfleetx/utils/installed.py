"""The libraries that ppfleetx needs: which are installed, and what to tell the user if one is missing."""

from __future__ import annotations

from importlib import metadata

from ppfleetx.config.errors import UserError

_NAMED_ALIKE = ("jinja2", "numpy", "pydantic", "rich", "safetensors", "tiktoken", "tokenizers", "zstandard")
LIBRARIES = {"yaml": "pyyaml", **{name: name for name in _NAMED_ALIKE}}
"""The required libraries except Paddle, by import name. The values are their names on PyPI."""


class NotInstalledError(UserError):
    """A required library is missing; the message says how to install it."""


FOR_GPUS = (
    "paddlepaddle-gpu 3.3.x for your CUDA from Paddle's own package index, as PaddlePaddle's installation "
    "page says (the general index has version 2.6 only)"
)
"""The package to install on a machine with GPUs."""


def version_of(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def not_installed(error: ModuleNotFoundError) -> NotInstalledError | None:
    """Return an error that says how to install the library whose import has failed with ``error``; None if
    that library is not a required one."""
    missing = (error.name or "").partition(".")[0]
    if missing == "paddle":
        return NotInstalledError(
            "Paddle is not installed in this Python: on a CPU run `pip install 'ppfleetx[cpu]'` (or `pip "
            f"install paddlepaddle==3.3.1`), on a GPU install {FOR_GPUS}"
        )
    if missing in LIBRARIES:
        return NotInstalledError(
            f"{LIBRARIES[missing]} is not installed in this Python: run `pip install -e .` in the "
            "project's directory, which installs everything that is missing except Paddle"
        )
    # The failed import is a bug.
    return None
