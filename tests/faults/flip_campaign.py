"""Flip bits in and truncate every file of a checkpoint at random: all damage must be found.

``python -m tests.faults.flip_campaign --damages 100`` trains two steps on two ranks, then damages one file at
a time (manifest, marker and ``latest`` as often as data files): every damage must be found by
``tools/inspect_checkpoint.py --verify`` and by loading.
"""

from __future__ import annotations

import contextlib
import io
import random
import sys
import tempfile
from collections import Counter
from pathlib import Path

from ppfleetx.checkpoint.directory import open_resolved, resolve_checkpoint
from ppfleetx.commands.inspect_checkpoint import verify
from ppfleetx.config.errors import CheckpointError
from ppfleetx.config.plan import ParallelPlan
from tests.e2e.program import run
from tests.e2e.resumption import write_corpus
from tests.faults.harness import command_line, conclude, damaged, flipped
from tests.helpers.ranks import Pools


def make_checkpoint(pools: Pools, directory: Path) -> Path:
    """Output directory of a run of two steps on two ranks, with its checkpoint."""
    write_corpus(directory / "toy")
    overrides = {"Engine.max_steps": 2, "Model.num_layers": 4}
    run(pools, ParallelPlan(mp=2), directory / "toy", directory / "run", overrides=overrides)
    return directory / "run"


def damage_one(output_dir: Path, rng: random.Random) -> str:
    """Damage a file temporarily and return what was done. Raises AssertionError if it was not found."""
    (checkpoint,) = output_dir.glob("epoch_*")
    files = sorted(path for path in checkpoint.rglob("*") if path.is_file())
    path = rng.choice([*files, output_dir / "latest"])
    sound = path.read_bytes()
    what = rng.choice(["flip", "flip", "flip", "truncation"])
    content = flipped(sound, rng) if what == "flip" else sound[: rng.randrange(len(sound))]
    with damaged(path, content):
        assert found_by_tool(output_dir), f"--verify has not found the {what} in {path}"
        assert found_by_loading(output_dir), f"loading has not found the {what} in {path}"
    return f"{what} in {path.name}"


def found_by_tool(output_dir: Path) -> bool:
    """Whether ``tools/inspect_checkpoint.py --verify`` says that it is damaged."""
    with contextlib.redirect_stdout(io.StringIO()) as output:
        code = verify(str(output_dir))
    assert (code == 1) == output.getvalue().startswith("damaged: ")
    return code == 1


def found_by_loading(output_dir: Path) -> bool:
    """Whether it cannot be opened, or some tensor cannot be read."""
    try:
        checkpoint = open_resolved(resolve_checkpoint(output_dir))
        for entry in checkpoint.manifest.tensors.values():
            checkpoint.read(entry.name, entry.kind, entry.state)
    except CheckpointError:
        return True
    return False


def campaign(output_dir: Path, times: int, seed: int) -> Counter[str]:
    """Damage a file ``times`` times; the number of each kind of damage."""
    assert not found_by_tool(output_dir) and not found_by_loading(output_dir)
    rng = random.Random(seed)
    return Counter(damage_one(output_dir, rng) for _ in range(times))


def main() -> int:
    args = command_line(__doc__, damages=100).parse_args()
    pools = Pools()
    try:
        with tempfile.TemporaryDirectory(prefix="flips-") as name:
            found = campaign(make_checkpoint(pools, Path(name)), args.damages, args.seed)
    finally:
        pools.close()
    return conclude(found, [], f"all {found.total()} found by --verify and by loading")


if __name__ == "__main__":
    sys.exit(main())
