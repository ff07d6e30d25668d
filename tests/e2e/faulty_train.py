"""tools/train.py with a fault: ``FAULT=rank:step:kind``, once only if ``FAULT_ONCE`` names a file to be made.

Kinds: ``raise``, ``kill``, ``kill_launcher`` or ``data`` (a user's error) just before that step;
``kill_in_save`` between writing the rank's files of the checkpoint of that step and telling the others.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from ppfleetx.commands.main import call
from ppfleetx.config.errors import DataError
from ppfleetx.core.engine.engine import Engine
from ppfleetx.utils.exit_codes import run_tool


def main() -> None:
    rank, step, kind = os.environ["FAULT"].split(":")
    if rank == os.environ["PADDLE_TRAINER_ID"]:
        if kind == "kill_in_save":
            _break_save(int(step))
        else:
            _break_read(int(step), kind)
    call("train", program=None)


def _break_read(step: int, kind: str) -> None:
    read = Engine._read

    def faulty_read(engine, batches):
        if engine.state.step + 1 != step or not _is_due():
            return read(engine, batches)
        if kind == "kill_launcher":
            os.kill(os.getppid(), signal.SIGKILL)
            return read(engine, batches)
        return _fail(kind)

    Engine._read = faulty_read


def _break_save(step: int) -> None:
    from ppfleetx.checkpoint.manager import SharedSave

    write = SharedSave.write

    def faulty_write(save, pieces):
        index = write(save, pieces)
        if save._at[1] == step and _is_due():
            _fail("kill")
        return index

    SharedSave.write = faulty_write


def _is_due() -> bool:
    if "FAULT_ONCE" not in os.environ:
        return True
    once = Path(os.environ["FAULT_ONCE"])
    due = not once.exists()
    once.touch()
    return due


def _fail(kind: str):
    if kind == "data":
        return None, DataError("the corpus is gone")
    if kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    raise RuntimeError("a fault made for a test")


if __name__ == "__main__":
    run_tool(main)
