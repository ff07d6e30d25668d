"""Import ppfleetx from this checkout, for the scripts beside this file, each of which runs one verb
(subcommand)."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from ppfleetx.commands.main import run_program

__all__ = ["run_program"]
