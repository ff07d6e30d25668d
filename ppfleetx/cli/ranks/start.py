"""``start.py VERB ARGUMENTS``: a verb as the script that Paddle's launcher starts in each rank.

The launcher takes the path of a script and no module. This file has a folder to itself, because Python puts
the folder of a script first on its path, where `ppfleetx/cli/plan.py` would be a module named `plan`.
"""

from __future__ import annotations

import sys
from pathlib import Path

SCRIPT = Path(__file__).resolve()

if __name__ == "__main__":
    sys.path[0] = str(SCRIPT.parents[3])  # the ranks use the package whose command started them

    from ppfleetx.cli.main import PROGRAM, run_program

    run_program(sys.argv[1], sys.argv[2:], program=PROGRAM)
