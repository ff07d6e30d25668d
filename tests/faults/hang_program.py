"""tools/train.py, in which one rank halts at a chosen moment in a chosen way.

Environment: ``HANG_CASE``: one of :data:`FAULTS`, or a moment of :func:`amid`; ``HANG_RANK``: the rank that
halts; ``HANG_DIR``: where that rank writes ``reached``, with its process id, at the moment.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import paddle
from paddle import distributed

from ppfleetx.checkpoint.manager import SharedSave
from ppfleetx.commands.main import run_program
from ppfleetx.core.engine.engine import Engine
from ppfleetx.data.gpt_dataset import GPTDataset
from ppfleetx.distributed.cpu.transport import Connections
from ppfleetx.resilience.progress import PROGRESS

AT_STEP = 3


def reached() -> None:
    """Report that the fault is about to happen."""
    file = Path(os.environ["HANG_DIR"]) / "reached"
    file.with_suffix(".part").write_text(str(os.getpid()))
    file.with_suffix(".part").rename(file)  # whole, or not there


def for_ever() -> None:
    threading.Event().wait()


def before_step(act: Callable[[Engine], None], *, on_all: bool = False) -> None:
    """Call ``act`` before the third step, on the faulty rank or on all."""
    step = Engine._step

    def halting(engine: Engine, *arguments: Any) -> None:
        if engine.state.step + 1 == AT_STEP and (on_all or is_chosen()):
            if is_chosen():
                reached()
            act(engine)
        step(engine, *arguments)

    Engine._step = halting


def is_chosen() -> bool:
    return os.environ["PADDLE_TRAINER_ID"] == os.environ["HANG_RANK"]


def stop() -> None:
    before_step(lambda engine: os.kill(os.getpid(), signal.SIGSTOP))


def shapes() -> None:
    before_step(lambda engine: distributed.all_reduce(paddle.ones([4 + is_chosen()])), on_all=True)


def skipped() -> None:
    def act(engine: Engine) -> None:
        group = distributed.new_group(list(range(distributed.get_world_size())))
        if not is_chosen():
            distributed.all_reduce(paddle.ones([2, 3]), group=group)

    before_step(act, on_all=True)


def order() -> None:
    """One rank uses two groups in another order."""

    def act(engine: Engine) -> None:
        ranks = list(range(distributed.get_world_size()))
        groups = [distributed.new_group(ranks), distributed.new_group(ranks)]
        for group in reversed(groups) if is_chosen() else groups:
            distributed.all_reduce(paddle.ones([5]), group=group)

    before_step(act, on_all=True)


def data() -> None:
    """Reading a sample blocks, as when its file server is gone."""
    get, count = GPTDataset.__getitem__, [0]

    def slow(dataset: GPTDataset, index: int) -> Any:
        count[0] += 1
        if count[0] == 40 and is_chosen():
            reached()
            for_ever()
        return get(dataset, index)

    GPTDataset.__getitem__ = slow


def disk() -> None:
    sync = os.fsync

    def dead(descriptor: Any) -> None:
        if is_chosen() and PROGRESS.is_past_start:
            reached()
            for_ever()
        sync(descriptor)

    os.fsync = dead


def importing() -> None:
    """An import waits for a lock that another thread holds."""

    def act(engine: Engine) -> None:
        directory = Path(os.environ["HANG_DIR"])
        (directory / "waits_for_a_lock.py").write_text("import threading\nthreading.Event().wait()\n")
        sys.path.insert(0, str(directory))
        import waits_for_a_lock  # noqa: F401

    before_step(act)


def another_step() -> None:
    """One rank is a step ahead, so it evaluates while the others train."""

    def act(engine: Engine) -> None:
        engine.state.step += 1

    before_step(act)


def link() -> None:
    """The moment at which the link between two machines goes down."""
    before_step(lambda engine: time.sleep(1))


def kill() -> None:
    before_step(lambda engine: os.kill(os.getpid(), signal.SIGKILL))


def endless() -> None:
    """The next collective of the reference device never ends on this rank."""
    from tests.device.reference import Device

    before_step(lambda engine: Device().set("hang_collective", 1))


def amid(moment: str, share: float) -> None:
    """Halt in the third ``step`` or the second ``eval``uation when a share of its communications is done, or
    before (0) or after (1) this rank's part of the first ``save``."""
    if moment == "save":
        _halt_in_save(after=bool(share))
        return
    name, number = {"step": ("_step", 3), "eval": ("evaluate", 2)}[moment]
    act, launch, calls, count, total, halts_at = getattr(Engine, name), Connections.launch, 0, 0, 0, -1

    def counted(mesh: Connections, operation: Any, *, sync: bool) -> Any:
        nonlocal count
        if count == halts_at:
            reached()
            for_ever()
        count += 1
        return launch(mesh, operation, sync=sync)

    def measured(engine: Engine, *arguments: Any) -> Any:
        nonlocal calls, total, halts_at
        calls, before = calls + 1, count
        if calls == number:
            halts_at = before + int(share * total)
        done = act(engine, *arguments)
        total = count - before
        return done

    Connections.launch = counted
    setattr(Engine, name, measured)


def _halt_in_save(*, after: bool) -> None:
    write = SharedSave.write

    def halting(save: SharedSave, pieces: Any) -> Any:
        if after:
            write(save, pieces)
        reached()
        for_ever()

    SharedSave.write = halting


FAULTS: dict[str, Callable[[], None]] = {
    act.__name__: act
    for act in (stop, shapes, skipped, order, data, disk, importing, another_step, link, kill, endless)
}


def main() -> None:
    name, _, share = os.environ["HANG_CASE"].partition(":")
    if name in FAULTS:
        FAULTS[name]()
    elif is_chosen():
        amid(name, float(share))
    run_program("train")


if __name__ == "__main__":
    main()
