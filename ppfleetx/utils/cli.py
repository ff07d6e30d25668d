"""What every tool's command line shares: ``-c``, ``-o``, and how errors end."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable

from ppfleetx.config.errors import PeerEndedError, UserError

EXIT_USER_ERROR = 2
EXIT_PEER_LOST = 3
EXIT_INTERRUPTED = 130

# The launcher looks at its ranks every second or two, shows the log of the first it finds ended and then
# ends the others. It should find the one that failed, not those that ended because of it.
_LAUNCHER_LOOKS_SECONDS = 5.0


def add_config_arguments(parser: argparse.ArgumentParser) -> None:
    """Add ``-c FILE`` and any number of ``-o Section.key=value``."""
    parser.add_argument("-c", "--config", required=True, metavar="FILE", help="YAML configuration")
    parser.add_argument(
        "-o",
        "--override",
        action="append",
        default=[],
        metavar="Section.key=value",
        help="replace one value of the configuration; may be given many times",
    )


def run_tool(main: Callable[[], int | None]) -> None:
    """Run a tool's ``main`` and end the process with its exit code.

    A :class:`UserError` is printed as one message and ends with code 2, the end of another process of
    the job likewise with code 3; anything else is a defect of the program and keeps its traceback.
    """
    try:
        code = main()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        code = EXIT_USER_ERROR
    except PeerEndedError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        code = EXIT_PEER_LOST
        if "PADDLE_TRAINER_ID" in os.environ:
            time.sleep(_LAUNCHER_LOOKS_SECONDS)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        code = EXIT_INTERRUPTED
    sys.exit(code or 0)
