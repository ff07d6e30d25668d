"""Random flipped bytes and truncations over all files of a checkpoint: every one has to be found.

``python -m tests.faults.flip_campaign --damages 100`` trains two steps on two ranks, then damages one file at
a time (manifest, marker and ``latest`` as often as data files): every damage must be found by
``tools/inspect_checkpoint.py --verify`` and by loading.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import random
import sys
import tempfile
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from ppfleetx.checkpoint.directory import open_resolved, resolve_checkpoint
from ppfleetx.commands.inspect_checkpoint import verify
from ppfleetx.config.errors import CheckpointError
from ppfleetx.config.plan import ParallelPlan
from tests.e2e.program import run
from tests.e2e.resumption import write_corpus
from tests.helpers.ranks import Pools


def make_checkpoint(pools: Pools, directory: Path) -> Path:
    """Output directory of a run of two steps on two ranks, with its checkpoint."""
    write_corpus(directory / "toy")
    run(
        pools,
        ParallelPlan(mp=2),
        directory / "toy",
        directory / "run",
        overrides={"Engine.max_steps": 2, "Model.num_layers": 4},
    )
    return directory / "run"


def files_of(output_dir: Path) -> list[Path]:
    """All files of the newest checkpoint, and ``latest``."""
    (checkpoint,) = output_dir.glob("epoch_*")
    return [*sorted(path for path in checkpoint.rglob("*") if path.is_file()), output_dir / "latest"]


def damage_one(output_dir: Path, rng: random.Random) -> str:
    """Damage a file, look whether it is found, and mend it; what was done, and to which file.

    Raises:
        AssertionError: it was not found.
    """
    path = rng.choice(files_of(output_dir))
    sound = path.read_bytes()
    what = rng.choice(["flip", "flip", "flip", "truncation"])
    position = rng.randrange(len(sound))
    if what == "flip":
        wrong = bytes([sound[position] ^ (1 << rng.randrange(8))])
        path.write_bytes(sound[:position] + wrong + sound[position + 1 :])
    else:
        path.write_bytes(sound[:position])
    told = f"{what} at byte {position} of {path.relative_to(output_dir)}"
    try:
        assert found_by_tool(output_dir), f"--verify has not found the {told}"
        assert found_by_loading(output_dir), f"loading has not found the {told}"
    finally:
        path.write_bytes(sound)
    return f"{what} in {path.name}"


def found_by_tool(output_dir: Path) -> bool:
    """Whether ``tools/inspect_checkpoint.py --verify`` says that it is damaged."""
    with contextlib.redirect_stdout(io.StringIO()) as output:
        code = verify(str(output_dir))
    assert (code == 1) == output.getvalue().startswith("damaged: ")
    return code == 1


def found_by_loading(output_dir: Path) -> bool:
    """Whether it cannot be opened, or some tensor cannot be read, without a look at the rest before."""
    try:
        checkpoint = open_resolved(resolve_checkpoint(output_dir))
        for entry in checkpoint.manifest.tensors.values():
            checkpoint.read(entry.name, entry.kind, entry.state)
    except CheckpointError:
        return True
    return False


def campaign(output_dir: Path, times: int, seed: int) -> Counter[str]:
    """Damage so often; how often what was found."""
    assert not found_by_tool(output_dir) and not found_by_loading(output_dir)
    rng = random.Random(seed)
    found = Counter(damage_one(output_dir, rng) for _ in range(times))
    assert not found_by_tool(output_dir), "what was mended is not as before"
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--damages", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    pools = Pools()
    try:
        with tempfile.TemporaryDirectory(prefix="flips-") as name:
            found = campaign(make_checkpoint(pools, Path(name)), args.damages, args.seed)
    finally:
        pools.close()
    for what, count in sorted(found.items()):
        print(f"{count:4d} {what}")
    print(f"all {found.total()} found by --verify and by loading")
    return 0


if __name__ == "__main__":
    sys.exit(main())
