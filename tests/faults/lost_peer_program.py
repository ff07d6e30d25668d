"""tools/train.py in watched ranks: one of them halts at a chosen moment until there is a file ``go``.

Environment: ``LOST_DIR``: where a rank leaves ``pid.RANK`` when it starts and ``code.RANK`` when it ends;
``LOST_RANK``: the rank that halts, which it tells by ``reached`` there, until there is ``go``; ``LOST_AT``:
``step:F``, ``eval:F`` (in the third step, in the second evaluation, when the share F of its communications
is done), ``save:0`` or ``save:1`` (before or after it has written its part of the first checkpoint),
``start:0`` or ``start:1`` (before or after the ranks meet).
"""

from __future__ import annotations

import functools
import os
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from ppfleetx.checkpoint.save import SharedSave
from ppfleetx.commands.main import run_program
from ppfleetx.core.engine.engine import Engine
from ppfleetx.distributed.cpu import handshake as cpu_handshake
from ppfleetx.distributed.cpu.transport import Mesh

PATIENCE_SECONDS = 120.0


class Halt:
    """Halts this rank at one of its communications."""

    def __init__(self, directory: Path, share: float) -> None:
        self._directory, self._share = directory, share
        self._count, self._target = 0, -1

    def now(self) -> None:
        """Halt until there is a file ``go``."""
        (self._directory / "reached").touch()
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not (self._directory / "go").exists() and time.monotonic() < deadline:
            time.sleep(0.01)

    def watch_communication(self) -> None:
        """Count what is communicated from now on."""
        launch = Mesh.launch

        @functools.wraps(launch)
        def counted(mesh: Mesh, operation: Any, *, sync: bool) -> Any:
            if self._count == self._target:
                self._target = -1
                self.now()
            self._count += 1
            return launch(mesh, operation, sync=sync)

        Mesh.launch = counted

    def within(self, act: Any, *, measuring: bool, halting: bool) -> Any:
        """``act()``, whose communications are counted, or among which the rank halts."""
        before = self._count
        if halting:
            self._target = before + int(self._share * self._total)
        done = act()
        if measuring:
            self._total = self._count - before
        return done


def halt_in_step(halt: Halt) -> None:
    step = Engine._step

    def halting(engine: Engine, *arguments: Any) -> None:
        number = engine.state.step + 1
        halt.within(lambda: step(engine, *arguments), measuring=number == 2, halting=number == 3)

    Engine._step = halting


def halt_in_evaluation(halt: Halt) -> None:
    evaluate = Engine.evaluate

    def halting(engine: Engine, *arguments: Any) -> Any:
        is_first = engine.state.step == 0
        return halt.within(lambda: evaluate(engine, *arguments), measuring=is_first, halting=not is_first)

    Engine.evaluate = halting


def halt_in_save(halt: Halt, *, written: bool) -> None:
    write = SharedSave.write

    def halting(save: SharedSave, pieces: Any) -> Any:
        if not written:
            halt.now()
        index = write(save, pieces)
        if written:
            halt.now()
        return index

    SharedSave.write = halting


def halt_in_start(halt: Halt, *, met: bool) -> None:
    meet = cpu_handshake.meet

    def halting(*arguments: Any) -> Any:
        if not met:
            halt.now()
        members = meet(*arguments)
        if met:
            halt.now()
        return members

    cpu_handshake.meet = halting


def main() -> None:
    directory, rank = Path(os.environ["LOST_DIR"]), os.environ["PADDLE_TRAINER_ID"]
    written = directory / f"pid.{rank}.new"
    written.write_text(str(os.getpid()))
    written.rename(directory / f"pid.{rank}")  # whole, or not there
    if rank == os.environ["LOST_RANK"]:
        moment, _, share = os.environ["LOST_AT"].partition(":")
        halt = Halt(directory, float(share))
        if moment == "save":
            halt_in_save(halt, written=share == "1")
        elif moment == "start":
            halt_in_start(halt, met=share == "1")
        else:
            halt.watch_communication()
            {"step": halt_in_step, "eval": halt_in_evaluation}[moment](halt)

    def record(code: object) -> None:
        file = directory / f"code.{rank}"
        if not file.exists():
            file.write_text(str(code))

    leave = os._exit
    os._exit = lambda code: (record(f"{code} (forced)"), leave(code))
    try:
        run_program("train")
    except SystemExit as end:
        record(end.code)
        raise
    except BaseException as error:
        record(f"1 ({type(error).__name__})")
        raise


if __name__ == "__main__":
    main()
