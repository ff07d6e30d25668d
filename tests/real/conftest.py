"""CPU settings, before Paddle is imported: without them these tests take several times as long on AMD."""

import os

from ppfleetx.utils.process_env import prepare_process

if os.environ.get("PPFLEETX_REAL_MODEL"):
    prepare_process()
