"""Paddle's launcher as it is where ``python -m ppfleetx.utils.cpu_launcher`` has been run."""

import runpy
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from ppfleetx.utils import cpu_launcher
from ppfleetx.utils.end_processes import LAUNCHER

sys.orig_argv = [sys.executable, "-m", LAUNCHER, *sys.argv[1:]]
cpu_launcher.apply()
runpy.run_module(LAUNCHER, run_name="__main__", alter_sys=True)
