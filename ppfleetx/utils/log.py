"""The program's logger, with FleetX's line format.

``[2022-07-27 12:40:00,833] [ INFO] - message`` on stdout; colors only on a terminal.
"""

from __future__ import annotations

import logging
import sys

_FORMAT = "[%(asctime)s] [%(levelname)8s] - %(message)s"


def get_logger() -> logging.Logger:
    """Return the logger ``ppfleetx``, which has no handler until a program calls
    :func:`configure_logging`."""
    return logging.getLogger("ppfleetx")


def configure_logging(*, quiet: bool = False) -> logging.Logger:
    """Add the logger's stdout handler. With ``quiet``, for ranks other than the main rank, only warnings are
    shown."""
    logger = get_logger()
    logger.handlers.clear()
    handler = _Handler(_Stdout())
    handler.setFormatter(logging.Formatter(_FORMAT))
    logger.addHandler(handler)
    logger.setLevel(logging.WARNING if quiet else logging.INFO)
    logger.propagate = False
    return logger


class _Handler(logging.StreamHandler):
    """A handler that lets the program end silently when the reader of a pipe is gone."""

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 logging's name
        if isinstance(sys.exception(), BrokenPipeError):
            raise  # re-raises the exception being handled
        super().handleError(record)


class _Stdout:
    """The current ``sys.stdout``, which a progress bar or a test may replace at any time."""

    def write(self, text: str) -> int:
        return sys.stdout.write(text)

    def flush(self) -> None:
        sys.stdout.flush()
