"""tools/train.py with a fault: ``FAULT=rank:step:kind`` (raise, kill, hang or data) just before that step."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]

import train

from ppfleetx.config.errors import DataError
from ppfleetx.core.engine.engine import Engine
from ppfleetx.utils.cli import run_tool


def main() -> None:
    rank, step, kind = os.environ["FAULT"].split(":")
    once = Path(os.environ["FAULT_ONCE"]) if "FAULT_ONCE" in os.environ else None
    read = Engine._read

    def faulty_read(engine, batches):
        due = engine.ctx.rank == int(rank) and engine.state.step + 1 == int(step)
        if due and not (once is not None and once.exists()):
            if once is not None:
                once.touch()
            return _fail(kind)
        return read(engine, batches)

    Engine._read = faulty_read
    train.main()


def _fail(kind: str):
    if kind == "raise":
        raise RuntimeError("a fault made for a test")
    if kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == "data":
        return None, DataError("the corpus is gone")
    time.sleep(3600)
    return None


if __name__ == "__main__":
    run_tool(main)
