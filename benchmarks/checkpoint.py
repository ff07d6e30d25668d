"""Bandwidth of checkpoints, and what a save in the background costs the step it runs beside.

``python benchmarks/checkpoint.py --megabytes 1024 --directory DIR`` writes a state of that size with ours and
with others (``safetensors``; ``torch.save`` and ``torch.distributed.checkpoint`` where PyTorch is installed),
in turn, and reads it again. Every save is flushed to the disk; files are read from the page cache. Then it
times steps of about one second with and without a save in the background. One JSON line per result.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import harness  # noqa: F401 - the project can be imported
import numpy as np

from ppfleetx.checkpoint.manager import BackgroundManager, save_checkpoint
from ppfleetx.checkpoint.reader import open_checkpoint
from ppfleetx.checkpoint.run_ownership import Ownership, new_run
from ppfleetx.checkpoint.slices import TensorSlice, whole

ROWS, COLUMNS = 4096, 1024
STATES = ("", "moment1", "moment2")
State = dict[str, np.ndarray]


def make_state(num_bytes: int) -> State:
    """Float32 matrices of 16 MiB, as many as come to this size."""
    rng = np.random.default_rng(0)
    count = max(3, num_bytes // (4 * ROWS * COLUMNS))
    return {f"{n // 3}.{n % 3}": rng.random((ROWS, COLUMNS), np.float32) for n in range(count)}


def slices_of(state: State, *, live: bool = False) -> list[TensorSlice]:
    pieces = []
    for name, array in state.items():
        parameter, number = name.split(".")
        states = STATES[int(number)]
        piece = whole(parameter, array, kind="optimizer" if states else "model", state=states)
        pieces.append(TensorSlice(**{**vars(piece), "changes_with_update": live}))
    return pieces


def flush(path: Path) -> None:
    for file in [path] if path.is_file() else [found for found in path.rglob("*") if found.is_file()]:
        with file.open("rb") as opened:
            os.fsync(opened.fileno())


def save_ours(state: State, place: Path, *, verify: bool = True) -> None:
    save_checkpoint(place, epoch=0, step=1, tensors=slices_of(state), state={}, verify=verify)


def load_ours(place: Path, into: State) -> None:
    checkpoint = open_checkpoint(place / "epoch_0_step_1")
    for piece in slices_of(into):
        checkpoint.read(piece.name, piece.kind, piece.state, out=piece.data)


def save_safetensors(state: State, place: Path) -> None:
    from safetensors.numpy import save_file

    place.mkdir()
    save_file(state, place / "state.safetensors")
    flush(place)


def load_safetensors(place: Path, into: State) -> None:
    from safetensors.numpy import load_file

    for name, array in load_file(place / "state.safetensors").items():
        np.copyto(into[name], array)


def save_torch(state: State, place: Path) -> None:
    import torch

    place.mkdir()
    torch.save({name: torch.from_numpy(array) for name, array in state.items()}, place / "state.pt")
    flush(place)


def load_torch(place: Path, into: State) -> None:
    import torch

    for name, tensor in torch.load(place / "state.pt", weights_only=True).items():
        np.copyto(into[name], tensor.numpy())


def save_dcp(state: State, place: Path) -> None:
    import torch
    from torch.distributed import checkpoint

    tensors = {name: torch.from_numpy(array) for name, array in state.items()}
    checkpoint.save(tensors, checkpoint_id=place, no_dist=True)  # its writer flushes


def load_dcp(place: Path, into: State) -> None:
    import torch
    from torch.distributed import checkpoint

    tensors = {name: torch.from_numpy(array) for name, array in into.items()}
    checkpoint.load(tensors, checkpoint_id=place, no_dist=True)


def seconds(work: Callable[[], Any]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def compare(state: State, directory: Path, pairs: int) -> None:
    """Ours against each other program, in turn, so that what else the machine does meets both."""
    size = sum(array.nbytes for array in state.values()) / 1e9
    others = {"ours without reading back": (partial(save_ours, verify=False), load_ours)}
    others["safetensors"] = (save_safetensors, load_safetensors)
    if importlib.util.find_spec("torch"):
        others |= {"torch.save": (save_torch, load_torch), "torch dcp": (save_dcp, load_dcp)}
    target = {name: np.ones_like(array) for name, array in state.items()}
    for name, (save, load) in others.items():
        times: dict[str, list[float]] = {"save": [], "save_ours": [], "load": [], "load_ours": []}
        for _ in range(pairs):
            for suffix, write, read in (("_ours", save_ours, load_ours), ("", save, load)):
                place = directory / "state"
                times[f"save{suffix}"].append(seconds(partial(write, state, place)))
                for array in target.values():
                    array[0] = 0
                times[f"load{suffix}"].append(seconds(partial(read, place, target)))
                assert all(np.array_equal(state[key], target[key]) for key in state), name
                shutil.rmtree(place)
        rate = {f"{what}_GB_per_s": round(size / statistics.median(took), 2) for what, took in times.items()}
        print(json.dumps({"against": name, "pairs": pairs, **rate}), flush=True)


def stall(state: State, directory: Path, steps: int, step_seconds: float) -> None:
    """Steps that read for most of their time and change everything at their end, as training does."""
    manager = BackgroundManager(directory, Ownership(new_run(), keep_max=1))
    a = np.ones((512, 512), np.float32)
    rounds = max(1, int(step_seconds / (seconds(lambda: [a @ a for _ in range(50)]) / 50)))
    pieces = slices_of(state, live=True)
    plain, saving, stalls = [], [], []
    for step in range(1, 2 * steps + 1):
        started, saves, stalled = time.perf_counter(), step % 2 == 0, 0.0
        if saves:
            manager.wait()
            started = time.perf_counter()
            stalled += seconds(lambda s=step: manager.save(epoch=0, step=s, tensors=pieces, state={}))
        for _ in range(rounds):
            a @ a
        stalled += seconds(manager.wait_for_copy)
        for array in state.values():
            array[0] += 1
        (saving if saves else plain).append(time.perf_counter() - started)
        if saves and step > 2:  # the first takes memory that the others find
            stalls.append(stalled)
    manager.wait()
    median = statistics.median
    print(
        json.dumps(
            {
                "steps": steps,
                "plain_step_s": round(median(plain), 3),
                "step_beside_a_save_s": round(median(saving), 3),
                "stall_s": round(median(stalls), 4),
                "stall_share_of_step": round(median(stalls) / median(plain), 4),
                "worst_stall_s": round(max(stalls), 4),
            }
        )
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=int, default=1024)
    parser.add_argument(
        "--directory", help="on the disk to measure; default: the system's for temporary files"
    )
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--steps", type=int, default=10, help="with a save beside each, and as many without")
    parser.add_argument("--step-seconds", type=float, default=1.0)
    args = parser.parse_args()
    state = make_state(args.megabytes << 20)
    with tempfile.TemporaryDirectory(dir=args.directory) as name:
        compare(state, Path(name), args.pairs)
        stall(state, Path(name) / "background", args.steps, args.step_seconds)


if __name__ == "__main__":
    main()
