"""``start.py VERB ARGUMENTS``: a verb as the script that Paddle's launcher starts in each rank.

The launcher takes the path of a script and no module. This file has a folder to itself, because Python puts
the folder of a script first on its path, where `ppfleetx/cli/plan.py` would be a module named `plan`.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[3])  # the package whose command started the ranks
    from ppfleetx.cli.main import PROGRAM, run_program
    from ppfleetx.cli.marks import MarkedStream

    if os.environ.get("PADDLE_TRAINER_ID", "").isdigit():
        sys.stderr = MarkedStream(sys.stderr, int(os.environ["PADDLE_TRAINER_ID"]))
    run_program(sys.argv[1], sys.argv[2:], program=PROGRAM)
