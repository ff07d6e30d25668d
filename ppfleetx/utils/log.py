"""The logger of ppfleetx. It writes to standard output, in FleetX's format, in color on a terminal:

``[2022-07-27 12:40:00,833] [    INFO] - message``
"""

from __future__ import annotations

import logging
import sys

_FORMAT = "[%(asctime)s] [%(levelname)8s] - %(message)s"


def get_logger() -> logging.Logger:
    """Return the logger of ppfleetx. Until a program calls :func:`configure_logging`, Python's usual rules
    apply: only warnings and errors are printed, on standard error."""
    return logging.getLogger("ppfleetx")


def configure_logging(*, quiet: bool = False) -> logging.Logger:
    """Make ppfleetx's logger write to standard output, and return it. With ``quiet``, it writes only warnings
    and errors."""
    logger = get_logger()
    logger.handlers.clear()
    handler = _Handler(_Stdout())
    handler.setFormatter(logging.Formatter(_FORMAT))
    logger.addHandler(handler)
    logger.setLevel(logging.WARNING if quiet else logging.INFO)
    logger.propagate = False
    return logger


class _Handler(logging.StreamHandler):
    """A log handler that re-raises BrokenPipeError, as after ``| head -1``, so that the program ends.
    Python's own handler prints a traceback and continues."""

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 logging's name
        if isinstance(sys.exception(), BrokenPipeError):
            raise  # re-raises the exception being handled
        super().handleError(record)


class _Stdout:
    """A stream that writes to the current ``sys.stdout``, which a progress bar or a test can replace."""

    def write(self, text: str) -> int:
        return sys.stdout.write(text)

    def flush(self) -> None:
        sys.stdout.flush()
