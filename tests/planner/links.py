"""Do plans rank on slow links as the planner says? Four CPU ranks on two nodes that a slow wire joins.

    python -m tests.planner.links [--megabits 100 1000] [--delay 0.005] [--steps 7] [--share 0.4]

Two network namespaces are joined by a wire (``wire.py``) of 100 Mbit/s and then of 1 Gbit/s, 5 ms each way.
Eight plans train a few steps on each; the card is fitted to two of them with ``--calibrate``, and the rank
correlation (Spearman) of predicted and measured step times is printed. Each rank has the same share of a core
(``shares.py``): devices do not become faster while others wait. Needs root; takes some ten minutes.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

from ppfleetx.config.loader import load_config
from ppfleetx.distributed.cpu.handshake import DIRECT_VARIABLE
from ppfleetx.planner.calibration import calibrate
from ppfleetx.planner.cards import load_card
from ppfleetx.planner.job import job_of
from ppfleetx.planner.network import Cluster
from ppfleetx.planner.step_time import step_time
from tests.e2e.conftest import ROOT, environment, records
from tests.multinode.nodes import Node, joined
from tests.planner.plans import overrides
from tests.planner.shares import shares
from tests.planner.wire import MTU, wire

CONFIG = ROOT / "ppfleetx/configs/debug/gpt_nano.yaml"
SHARES = Path(__file__).with_name("shares.py")
SEQ_LEN, VOCAB = 64, 2048
SIZES = {
    "Global.global_batch_size": 8,
    "Global.local_batch_size": "null",
    "Global.micro_batch_size": 1,
    "Data.Train.dataset.max_seq_len": SEQ_LEN,
    "Data.Eval.dataset.max_seq_len": SEQ_LEN,
    "Model.vocab_size": VOCAB,
    "Model.num_layers": 4,
    "Model.num_attention_heads": 8,
    "Model.max_position_embeddings": SEQ_LEN,
    "Model.hidden_dropout_prob": 0.0,
    "Model.attention_probs_dropout_prob": 0.0,
    "Engine.eval_freq": 0,
    "Engine.save_load.save_steps": "null",
}
PLANS = (
    {"dp": 4},
    {"dp": 2, "mp": 2},
    {"mp": 4},
    {"pp": 4},
    {"dp": 2, "pp": 2},
    {"mp": 2, "pp": 2},
    {"sharding": 4, "stage": 2},
    {"sharding": 4, "stage": 3},
)
ENVIRONMENT = {**environment(), DIRECT_VARIABLE: "0"}
"""Both nodes are this machine, whose processes would read each other's memory past the wire."""
FITTED = (1, 3)
"""Plans that the card is fitted to: one sums activations in a node and gradients over the wire, the other one
sends activations over it."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--steps", type=int, default=7, help="steps of each run, of which two do not count")
    parser.add_argument("--delay", type=float, default=0.005, help="seconds from one node to the other")
    parser.add_argument("--megabits", type=float, nargs="+", default=[100.0, 1000.0])
    parser.add_argument("--share", type=float, default=0.4, help="of a core, for each rank")
    args = parser.parse_args()
    for megabits in args.megabits:
        with tempfile.TemporaryDirectory() as name:
            _compare(Path(name), megabits, args.delay, args.steps, args.share)


def _compare(directory: Path, megabits: float, delay: float, steps: int, share: float) -> None:
    _write_corpus(directory / "corpus")
    runs = []
    with joined(lambda: wire(megabits * 1e6 / 8, delay), MTU) as nodes, shares(4, share) as groups:
        for number, plan in enumerate(PLANS):
            runs.append(directory / f"run{number}")
            settings = {**SIZES, **overrides(plan), "Model.hidden_size": _width(megabits)}
            settings |= {"Engine.max_steps": steps, "Engine.save_load.output_dir": runs[-1]}
            _train(nodes, settings, directory / "corpus", runs[-1], 38600 + number, groups)
    card = load_card("CPU").model_copy(update={"network_latency_us": delay * 1e6, "network_efficiency": 0.9})
    cluster = Cluster(card, per_node=2, network=megabits * 1e6 / 8)
    fitted, told = calibrate([str(runs[number]) for number in FITTED], cluster, None)
    print(f"{megabits:g} Mbit/s, {delay * 1e3:g} ms each way\n{told}")
    there = Cluster(fitted, per_node=2, network=cluster.network)
    pairs = []
    for plan, run in zip(PLANS, runs, strict=True):
        predicted = step_time(job_of(load_config(run / "config.yaml"), fitted), there).seconds
        pairs.append((predicted, _median_step(run)))
        print(f"  {plan}: predicted {pairs[-1][0]:.3f} s, measured {pairs[-1][1]:.3f} s", flush=True)
    print(f"  rank correlation {_spearman(pairs):.2f}", flush=True)


def _width(megabits: float) -> int:
    """A model whose gradients take longer than its computation, so that plans differ by more than noise."""
    return 512 if megabits < 500 else 1024


def _train(
    nodes: tuple[Node, Node], settings: dict, corpus: Path, output: Path, port: int, groups: str
) -> None:
    """Both nodes' launchers, to the end.

    Raises:
        RuntimeError: one of them failed.
    """
    settings |= {"Data.Train.dataset.input_dir": corpus, "Data.Eval.dataset.input_dir": corpus}
    words = [word for key, value in settings.items() for word in ("-o", f"{key}={value}")]
    jobs = []
    for node in nodes:
        launcher = ["-m", "paddle.distributed.launch", "--master", f"{nodes[0].address}:{port}"]
        launcher += ["--nnodes", "2", "--host", node.address, "--nproc_per_node", "2"]
        launcher += ["--log_dir", f"{output}_log_{node.name}"]
        command = [
            sys.executable,
            *launcher,
            str(SHARES),
            groups,
            "tools/train.py",
            "-c",
            str(CONFIG),
            *words,
        ]
        log = (output.parent / f"{output.name}_{node.name}.txt").open("w")
        jobs.append(
            subprocess.Popen(
                node.command(*command), stdout=log, stderr=subprocess.STDOUT, env=ENVIRONMENT, cwd=ROOT
            )
        )
        log.close()
    codes = [job.wait(timeout=600) for job in jobs]
    if any(codes):
        raise RuntimeError((output.parent / f"{output.name}_{nodes[0].name}.txt").read_text()[-3000:])


def _median_step(run: Path) -> float:
    found = [record["batch_cost"] - record["reader_cost"] for record in records(run, "train")][2:]
    return sorted(found)[len(found) // 2]


def _spearman(pairs: list[tuple[float, float]]) -> float:
    """Rank correlation of two columns without ties."""
    columns = zip(*pairs, strict=True)
    first, second = ([sorted(column).index(value) for value in column] for column in columns)
    n = len(pairs)
    return 1 - 6 * sum((a - b) ** 2 for a, b in zip(first, second, strict=True)) / (n * (n * n - 1))


def _write_corpus(prefix: Path) -> None:
    import numpy as np

    from ppfleetx.data.indexed import IndexedDatasetWriter

    rng = np.random.default_rng(0)
    with IndexedDatasetWriter(prefix, np.uint16) as writer:
        for _ in range(60):
            document = rng.integers(0, VOCAB, 3000)
            writer.add_document(document, [document.size])


if __name__ == "__main__":
    main()
