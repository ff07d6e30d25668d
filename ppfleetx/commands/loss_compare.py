"""Implement ``ppfleetx compare``, which compares the losses of two runs."""

from __future__ import annotations

import contextlib
import math
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ppfleetx.commands.launching import SCRIPT
from ppfleetx.commands.loss_curves import (
    Record,
    check_picture_path,
    import_pyplot,
    number,
    save_figure,
    train_records,
)
from ppfleetx.commands.options import OptionalConfigOptions, option, repeated, switch
from ppfleetx.config.errors import ConfigError, DataError, UserError
from ppfleetx.config.message_text import counted
from ppfleetx.utils.end_processes import LAUNCHER
from ppfleetx.utils.output_files import refuse_unwritable

ROOT = Path(__file__).resolve().parents[2]

_RTOL = 1e-5


@dataclass(frozen=True)
class Difference:
    """The largest relative difference between two runs in one quantity, such as the loss, and the step at
    which it occurs."""

    key: str
    largest: float
    step: int


@dataclass(frozen=True, kw_only=True)
class Compare(OptionalConfigOptions):
    """Compare the losses of two runs: two plans, two commits, or two existing runs.

        ppfleetx compare -c FILE [-o BOTH ...] --a Distributed.mp_degree=2 --b Distributed.pp_degree=2
        ppfleetx compare -c FILE --commit-a main --commit-b HEAD --bitwise
        ppfleetx compare --metrics-a output_a --metrics-b output_b --plot losses.png

    Exit code 0: equal (bitwise, or within --rtol); 1: different; 2: a mistake on the command line.
    """

    a: tuple[str, ...] = repeated("override of a", metavar="KEY=VALUE")
    b: tuple[str, ...] = repeated("override of b", metavar="KEY=VALUE")
    commit_a: str | None = option("commit a runs from (default: this tree)", metavar="REV")
    commit_b: str | None = option("commit b runs from (default: this tree)", metavar="REV")
    metrics_a: str | None = option("output directory of a finished run a", metavar="DIR")
    metrics_b: str | None = option("output directory of a finished run b", metavar="DIR")
    bitwise: bool = switch("allow no difference at all")
    rtol: float | None = option(f"relative difference allowed (default: {_RTOL:g})")
    plot: str | None = option("draw both sequences and their difference", metavar="PNG")
    work_dir: str | None = option("keep outputs and logs here", metavar="DIR")

    def run(self) -> int:
        if not self.config and not (self.metrics_a and self.metrics_b):
            raise UserError("give -c FILE to run, or --metrics-a and --metrics-b to compare what exists")
        if self.plot:
            check_picture_path(Path(self.plot), "--plot")
        for side in "ab":
            metrics, overrides = getattr(self, f"metrics_{side}"), getattr(self, side)
            if metrics and (overrides or getattr(self, f"commit_{side}")):
                key = f"--{side}" if overrides else f"--commit-{side}"
                rule = f"--metrics-{side} names a finished run, which {key} cannot change"
                raise ConfigError(rule, key=key)
        if self.config and self.metrics_a and self.metrics_b:
            rule = "is not used, because --metrics-a and --metrics-b name both sides"
            raise ConfigError(rule, key="-c", value=self.config)
        if self.bitwise and self.rtol is not None:
            raise ConfigError("allows no difference, so it cannot go with --rtol", key="--bitwise")
        if self.work_dir is not None:
            refuse_unwritable(Path(self.work_dir), "--work-dir")
        with contextlib.ExitStack() as stack:
            work_dir = Path(self.work_dir or stack.enter_context(tempfile.TemporaryDirectory()))
            runs = []
            for side in "ab":
                metrics = getattr(self, f"metrics_{side}")
                runs.append(train_records(Path(metrics)) if metrics else run_side(side, self, work_dir))
        differences = compare(*runs)
        for difference in differences:
            largest = f"{difference.largest:.3e} (relative)"
            print(f"{difference.key:10} differs by {largest} at most, at step {difference.step}")
        if self.plot:
            draw_comparison(runs, Path(self.plot))
        allowed = 0.0 if self.bitwise else _RTOL if self.rtol is None else self.rtol
        same = all(difference.largest <= allowed for difference in differences)
        rule = "bit for bit" if self.bitwise else f"within {allowed:g}"
        print(f"{counted(len(runs[0]), 'step')}: {'equal' if same else 'DIFFERENT'} ({rule})")
        return 0 if same else 1


def run_side(side: str, options: Compare, work_dir: Path) -> list[Record]:
    """Train one of the two runs, ``a`` or ``b`` (``side``), and return its records of training steps. Raises
    UserError if the run fails."""
    from ppfleetx.config.loader import load_config
    from ppfleetx.config.shipped import find_config

    overrides = [*options.override, *getattr(options, side)]
    world = load_config(options.config, overrides).plan.world_size
    output_dir = work_dir / side
    overrides += [f"Engine.save_load.output_dir={output_dir}", "Engine.logging_freq=1"]
    words = [word for override in overrides for word in ("-o", override)]
    with tree_of(getattr(options, f"commit_{side}")) as tree:
        command = [sys.executable]
        if world > 1:
            logs = str(work_dir / f"{side}_log")
            command += ["-m", LAUNCHER, "--nproc_per_node", str(world), "--log_dir", logs]
        program = [str(SCRIPT), "train"] if tree is None else [str(tree / "tools/train.py")]
        command += [*program, "-c", str(find_config(options.config).resolve()), *words]
        said = " ".join(getattr(options, side)) or "as configured"
        print(f"{side}: {world} process{'es' if world > 1 else ''}, {said}")
        done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        said = (done.stderr or done.stdout).strip()[-3000:]
        said = re.sub("^error: ", "", said, flags=re.MULTILINE)  # this program adds its own prefix
        raise UserError(f"run {side} failed with code {done.returncode}:\n{said}")
    return train_records(output_dir)


@contextlib.contextmanager
def tree_of(commit: str | None) -> Iterator[Path | None]:
    """Context manager that yields a temporary directory with ppfleetx's files at the git commit ``commit``.
    If ``commit`` is None, it yields None, and the caller uses the ppfleetx that is running. Raises UserError
    if the commit does not exist."""
    if commit is None:
        yield None
        return
    if not (ROOT / ".git").exists():
        raise UserError(f"--commit {commit}: this ppfleetx is no checkout of its repository")
    with tempfile.TemporaryDirectory() as directory:
        git = ["git", "-C", str(ROOT), "worktree"]
        added = subprocess.run(
            [*git, "add", "--detach", f"{directory}/tree", commit], capture_output=True, text=True
        )
        if added.returncode:
            raise UserError(f"commit {commit}: {added.stderr.strip()}")
        try:
            yield Path(directory) / "tree"
        finally:
            subprocess.run([*git, "remove", "--force", f"{directory}/tree"], check=True)


def compare(a: Sequence[Record], b: Sequence[Record]) -> list[Difference]:
    """Return the largest relative differences between two runs, in loss and in gradient norm. Raises
    DataError if the runs recorded different steps, or none."""
    steps = [[record["step"] for record in run] for run in (a, b)]
    if steps[0] != steps[1] or not steps[0]:
        raise DataError(f"the runs recorded different steps: {len(steps[0])} of a and {len(steps[1])} of b")
    return [_largest(key, a, b) for key in ("loss", "grad_norm")]


def _largest(key: str, a: Sequence[Record], b: Sequence[Record]) -> Difference:
    found = Difference(key, 0.0, a[0]["step"])
    for one, other in zip(a, b, strict=True):
        relative = _relative(number(one, key), number(other, key))
        if relative > found.largest:
            found = Difference(key, relative, one["step"])
    return found


def _relative(a: float, b: float) -> float:
    """Return the relative difference of two numbers: 0 if neither is finite, infinite if only one is."""
    if not (math.isfinite(a) and math.isfinite(b)):
        return 0.0 if math.isfinite(a) == math.isfinite(b) else math.inf
    return abs(a - b) / max(abs(a), abs(b)) if a != b else 0.0


def draw_comparison(runs: Sequence[Sequence[Record]], path: Path) -> None:
    """Draw the loss curves of two runs, with their relative difference below, and write the picture to
    ``path``."""
    pyplot = import_pyplot()
    figure, (above, below) = pyplot.subplots(2, 1, sharex=True, figsize=(8, 6), height_ratios=(3, 1))
    steps = [record["step"] for record in runs[0]]
    losses = [[number(record, "loss") for record in run] for run in runs]
    for name, values in zip("ab", losses, strict=True):
        above.plot(steps, values, label=name, linestyle="-" if name == "a" else "--")
    above.set_ylabel("loss")
    above.legend()
    below.plot(steps, [abs(x - y) / abs(x) for x, y in zip(*losses, strict=True)])
    below.set_yscale("symlog", linthresh=1e-9)
    below.set_ylabel("relative difference")
    below.set_xlabel("step")
    save_figure(figure, path, "--plot")
    print(f"plot: {path}")
