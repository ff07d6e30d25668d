#!/usr/bin/env python3
"""Two data-parallel processes of one thread each against one process with two threads, in pairs.

    python benchmarks/dp_scaling.py [--pairs 5] [--steps 8] [--hidden 512] [--layers 6]

Both train the same global batch on the same two cores. Prints tokens per second of each run, the ratio of
each pair and the median ratio; 0.9 is the project's floor. ``--checks off cheap`` compares the levels of
``Engine.checks`` in the two-process run instead.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

VOCAB, SEQ_LEN, GLOBAL_BATCH = 8192, 256, 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--steps", type=int, default=8, help="timed steps, after two untimed")
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--checks", nargs=2, metavar="LEVEL", help="compare two levels of Engine.checks")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        _write_corpus(directory / "corpus")
        ratios = []
        for pair in range(args.pairs):
            runs = _pair(args, directory)
            # The order changes from pair to pair, so that a drift of the machine helps neither.
            order = list(runs) if pair % 2 == 0 else list(runs)[::-1]
            speeds = {label: runs[label]() for label in order}
            one, other = (speeds[label] for label in runs)
            ratios.append(other / one)
            told = ", ".join(f"{label} {speed:.0f} tokens/s" for label, speed in speeds.items())
            print(f"pair {pair + 1}: {told}, ratio {ratios[-1]:.3f}", flush=True)
    print(f"median ratio {statistics.median(ratios):.3f}, from {min(ratios):.3f} to {max(ratios):.3f}")


def _pair(args: argparse.Namespace, directory: Path) -> dict:
    """Label -> function that runs and gives tokens per second; the second is compared with the first."""
    if args.checks:
        return {
            f"checks {level}": lambda level=level: _run(args, directory, 2, level) for level in args.checks
        }
    return {
        "one process, two threads": lambda: _run(args, directory, 1, "cheap"),
        "two processes": lambda: _run(args, directory, 2, "cheap"),
    }


def _run(args: argparse.Namespace, directory: Path, processes: int, checks: str) -> float:
    """Train and give the median speed of the timed steps."""
    output_dir = Path(tempfile.mkdtemp(dir=directory))
    values = {
        "Global.global_batch_size": GLOBAL_BATCH,
        "Global.local_batch_size": "null",
        "Global.micro_batch_size": GLOBAL_BATCH // 2,
        "Engine.max_steps": args.steps + 2,
        "Engine.eval_freq": 0,
        "Engine.checks": checks,
        "Engine.save_load.save_steps": "null",
        "Engine.save_load.output_dir": output_dir,
        "Model.vocab_size": VOCAB,
        "Model.hidden_size": args.hidden,
        "Model.num_layers": args.layers,
        "Model.num_attention_heads": args.hidden // 64,
        "Model.max_position_embeddings": SEQ_LEN,
        "Data.Train.dataset.input_dir": directory / "corpus",
        "Data.Train.dataset.max_seq_len": SEQ_LEN,
        "Data.Eval.dataset.input_dir": directory / "corpus",
        "Data.Eval.dataset.max_seq_len": SEQ_LEN,
    }
    command = [sys.executable]
    if processes > 1:
        log_dir = str(output_dir / "log")
        command += ["-m", "paddle.distributed.launch", "--log_dir", log_dir, f"--nproc_per_node={processes}"]
    command += ["tools/train.py", "-c", "ppfleetx/configs/debug/gpt_nano.yaml"]
    command += [word for key, value in values.items() for word in ("-o", f"{key}={value}")]
    environ = {key: value for key, value in os.environ.items() if key != "OMP_NUM_THREADS"}
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"the run failed:\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}")
    lines = (output_dir / "metrics.jsonl").read_text().splitlines()
    seconds = [record["batch_cost"] for record in map(json.loads, lines) if record["kind"] == "train"][2:]
    return GLOBAL_BATCH * SEQ_LEN / statistics.median(seconds)


def _write_corpus(prefix: Path) -> None:
    import numpy as np

    from ppfleetx.data.indexed import IndexedDatasetWriter

    rng = np.random.default_rng(0)
    with IndexedDatasetWriter(prefix, np.uint16) as writer:
        for _ in range(100):
            document = rng.integers(0, VOCAB, 3000)
            writer.add_document(document, [document.size])


if __name__ == "__main__":
    main()
