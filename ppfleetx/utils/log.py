"""The one logger of the package."""

from __future__ import annotations

import logging


def get_logger() -> logging.Logger:
    """The logger named ``ppfleetx``; its handlers and level are set by whoever starts the process."""
    return logging.getLogger("ppfleetx")
