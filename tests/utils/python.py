"""A program in a Python interpreter of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def run_python(program: str, *arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run ``program`` to its end, in this environment with the variables ``environ``."""
    return subprocess.run(
        [sys.executable, "-c", program, *arguments],
        cwd=ROOT,
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        timeout=60,
    )
