#!/usr/bin/env python3
"""Decoding speed on a CPU, in pairs against Hugging Face transformers (PyTorch, float32).

    python benchmarks/decode.py [--threads 1] [--pairs 5] [--batches 1 8] [--modes dynamic exported hf]

A GPT-2 of 12 layers with hidden size 768, 12 heads and 50304 tokens continues prompts of 64 tokens by 64
greedy ones; nothing ends a row early. Both programs do all of ``generate``: the prompt's pass, the cache,
choosing the token, the loop. Compared are tokens per CPU second (time of the process on all its threads,
which other jobs on the machine disturb less than the clock on the wall). Each mode keeps a process of its
own that idles while the others run, and in every round the modes run one after the other on the same cores.
The operators for decoding (ppfleetx/nn/cpu_ops) are compiled first where they can be.

dynamic: this project, greedy, a pass for each token. sampling: the same with top-p 0.9.
lookup: what the generation program does for up to 3 greedy prompts: tokens are guessed from earlier text and
checked several in a pass. The gain depends on how much the text repeats itself, and random weights repeat
themselves more than trained ones; hf_lookup is transformers with its own option for it, for one row only.
exported, exported_lookup, exported_sampling: the same with the program that tools/export.py makes, run by
Paddle Inference. It guesses for a single row only; tools/inference.py lets it unless told otherwise.
hf: ``transformers.generate`` as it is set up by default.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ppfleetx.generation.decoding_session import NextTokenModel

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

LAYERS, HIDDEN, HEADS, VOCAB, POSITIONS = 12, 768, 12, 50304, 1024
PROMPT, NEW = 64, 64
GUESSES = 16  # the default of Generation.prompt_lookup_num_tokens

Generate = Callable[[list[list[int]]], list[list[int]]]
"""Prompts to the new tokens of each."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--pairs", type=int, default=5, help="rounds in which every mode runs once")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--modes", nargs="+", default=list(MODES), choices=list(MODES))
    parser.add_argument("--worker", choices=list(MODES), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        serve(MODES[args.worker](args.threads))
        return
    operators = [sys.executable, "-m", "ppfleetx.nn.cpu_ops", "--if-possible"]
    subprocess.run(operators, cwd=ROOT, check=True)
    workers = {mode: Worker(mode, args.threads) for mode in args.modes}
    try:
        for batch in args.batches:
            fitting = {m: worker for m, worker in workers.items() if batch == 1 or m not in ONE_ROW}
            report(batch, measure(fitting, batch, args.pairs), COMPARED)
    finally:
        for worker in workers.values():
            worker.close()


def measure(workers: dict[str, Worker], batch: int, pairs: int) -> dict[str, list[dict[str, float]]]:
    """One untimed round, then ``pairs`` timed ones: what each mode measured, round by round."""
    results: dict[str, list[dict[str, float]]] = {mode: [] for mode in workers}
    for number in range(pairs + 1):
        for mode, worker in workers.items():
            result = worker.run(batch)
            if number:
                results[mode].append(result)
    return results


def report(
    batch: int,
    results: dict[str, list[dict[str, float]]],
    compared: Sequence[tuple[str, str]],
) -> None:
    """Print every mode, and its ratio to Hugging Face's (or to our greedy search) round by round."""
    for mode, runs in results.items():
        cpu = [run["tokens_per_cpu_s"] for run in runs]
        wall = statistics.median(run["tokens_per_s"] for run in runs)
        print(
            f"batch {batch}  {mode:17} {statistics.median(cpu):7.2f} tokens per CPU second "
            f"({min(cpu):.2f} to {max(cpu):.2f}), {wall:.2f} per second"
        )
    for mode, reference in compared:
        if mode in results and reference in results:
            pairs = zip(results[mode], results[reference], strict=True)
            ratios = [ours["tokens_per_cpu_s"] / theirs["tokens_per_cpu_s"] for ours, theirs in pairs]
            text = ", ".join(f"{ratio:.2f}" for ratio in ratios)
            print(f"batch {batch}  {mode} / {reference}: {text}; median {statistics.median(ratios):.2f}")
    sys.stdout.flush()


class Worker:
    """A process that has one mode's model and works when it is asked to; other benchmarks use it, too."""

    def __init__(
        self,
        mode: str,
        threads: int,
        program: str = __file__,
        python: str = sys.executable,
        options: Sequence[str] = (),
    ) -> None:
        environ = {**os.environ, "OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
        command = [python, program, "--worker", mode, *options]
        if program == __file__:
            command += ["--threads", str(threads)]
        self._process = subprocess.Popen(
            command, env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def run(self, batch: int) -> dict[str, float]:
        self.start(batch)
        return self.result()

    def start(self, request: object) -> None:
        """Send one line, which the worker answers with one of JSON."""
        self._process.stdin.write(f"{request}\n")
        self._process.stdin.flush()

    def result(self) -> dict[str, float]:
        for line in self._process.stdout:
            if line.startswith("{"):
                return json.loads(line)
        raise SystemExit(f"a worker ended with code {self._process.wait()}")

    def close(self) -> None:
        self._process.stdin.close()
        self._process.wait()


def serve(generate: Generate) -> None:
    """In a worker: for each batch size read, generate and print what it took."""
    import numpy as np

    for line in sys.stdin:
        prompts = np.random.default_rng(0).integers(0, VOCAB, (int(line), PROMPT)).tolist()
        cpu, wall = time.process_time(), time.perf_counter()
        rows = generate(prompts)
        cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
        tokens = sum(map(len, rows))
        assert tokens == len(prompts) * NEW
        print(json.dumps({"tokens_per_cpu_s": tokens / cpu, "tokens_per_s": tokens / wall}), flush=True)


def ours(
    threads: int,
    *,
    most_guesses: int = 0,
    model: Callable[[], NextTokenModel] | None = None,
    **sampling: float,
) -> Generate:
    """The decoding loops that the generation program runs, on random weights."""
    next_token = (model or our_model)()
    import paddle

    from ppfleetx.generation.decode_loop import Rules, decode
    from ppfleetx.generation.decoding_session import DecodingSession
    from ppfleetx.generation.gumbel_sampling import RandomStream
    from ppfleetx.generation.sampling_params import SamplingParams
    from ppfleetx.generation.speculative_decoding import decode_with_drafts

    def generate(prompts: list[list[int]]) -> list[list[int]]:
        streams = [RandomStream(0, row, 0, VOCAB) for row in range(len(prompts))] if sampling else ()
        with paddle.no_grad():
            limits = [NEW] * len(prompts)
            if most_guesses:
                rows = decode_with_drafts(next_token, prompts, Rules(), limits, most_guesses)
            else:
                session = DecodingSession(next_token, prompts, use_cache=True)
                rows = decode(session, Rules(options=SamplingParams(**sampling)), limits, streams=streams)
        return [row.ids for row in rows]

    return generate


def exported(
    threads: int,
    *,
    top_k: int = 1,
    top_p: float = 1.0,
    most_guesses: int = 0,
    model: Callable[[], NextTokenModel] | None = None,
) -> Generate:
    """The same model as an exported program. Exporting takes a minute before the first round."""
    next_token = (model or our_model)()
    import numpy as np

    from ppfleetx.config.sections.root import InferenceConfig
    from ppfleetx.deploy.export_dir import PROGRAM
    from ppfleetx.deploy.inference_engine import Program
    from ppfleetx.deploy.static.program import save_program
    from ppfleetx.generation.gumbel_sampling import RandomStream

    with tempfile.TemporaryDirectory() as directory:
        save_program(next_token, POSITIONS, Path(directory) / PROGRAM)
        files = [path.name for path in Path(directory).iterdir()]
        program = Program(Path(directory), files, InferenceConfig(cpu_threads=threads), "cpu")

    def generate(prompts: list[list[int]]) -> list[list[int]]:
        rows = len(prompts)
        streams = [RandomStream(0, row, 0, VOCAB) for row in range(rows)]
        return program.run(
            {
                "tokens": np.array(prompts),
                "padding": np.zeros(rows, np.int64),
                "max_new_tokens": np.full(rows, NEW),
                "exponentials": np.stack([stream.numbers(0, NEW) for stream in streams]),
                "end_ids": np.array([-1]),
                "min_new_tokens": np.array([0]),
                "repetition_penalty": np.array([1.0], np.float32),
                "temperature": np.array([1.0], np.float32),
                "top_k": np.array([top_k]),
                "top_p": np.array([top_p], np.float32),
                "most_guesses": np.array([most_guesses]),
            }
        ).tolist()

    return generate


def our_model(**sizes: int) -> NextTokenModel:
    """This project's model with random weights, in a process that has its CPU settings; ``sizes`` are keys of
    ``Model`` that differ."""
    from ppfleetx.utils.process_env import import_paddle, prepare_process

    prepare_process()
    import_paddle()
    from ppfleetx.config.sections.root import ModelConfig
    from ppfleetx.generation.decoding_session import NextTokenModel
    from ppfleetx.models.gpt.stages import gpt_stages
    from ppfleetx.models.staged_model import StagedModel
    from ppfleetx.nn.layer_factory import InferenceFactory

    own = {
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "num_layers": LAYERS,
        "num_attention_heads": HEADS,
        "max_position_embeddings": POSITIONS,
    }
    model = StagedModel(gpt_stages(ModelConfig(**{**own, **sizes}), InferenceFactory()), seed=0)
    model.eval()
    return NextTokenModel(model, VOCAB)


def hugging_face(threads: int, *, prepare: Callable[[Any], Any] | None = None, **options: int) -> Generate:
    """``generate`` of transformers on a GPT-2 of the same shape with its own random weights.

    Args:
        prepare: what is done to the model first.
    """
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.set_num_threads(threads)
    torch.manual_seed(0)
    shape = GPT2Config(vocab_size=VOCAB, n_positions=POSITIONS, n_embd=HIDDEN, n_layer=LAYERS, n_head=HEADS)
    shape.bos_token_id = shape.eos_token_id = None
    model = GPT2LMHeadModel(shape).eval()
    if prepare is not None:
        model = prepare(model)

    def generate(prompts: list[list[int]]) -> list[list[int]]:
        ids = torch.tensor(prompts)
        mask = torch.ones_like(ids)
        rules = {"do_sample": False, "max_new_tokens": NEW, "pad_token_id": 0, **options}
        out = model.generate(ids, attention_mask=mask, **rules)
        return out[:, PROMPT:].tolist()

    return generate


MODES: dict[str, Callable[[int], Generate]] = {
    "dynamic": ours,
    "lookup": lambda threads: ours(threads, most_guesses=GUESSES),
    "sampling": lambda threads: ours(threads, top_p=0.9),
    "exported": exported,
    "exported_lookup": lambda threads: exported(threads, most_guesses=GUESSES),
    "exported_sampling": lambda threads: exported(threads, top_k=0, top_p=0.9),
    "hf": hugging_face,
    "hf_lookup": lambda threads: hugging_face(threads, prompt_lookup_num_tokens=GUESSES),
}
ONE_ROW = ("hf_lookup", "exported_lookup")
COMPARED = (
    ("dynamic", "hf"),
    ("lookup", "hf"),
    ("lookup", "hf_lookup"),
    ("lookup", "dynamic"),
    ("sampling", "dynamic"),
    ("exported", "hf"),
    ("exported_lookup", "hf"),
    ("exported_lookup", "exported"),
    ("exported", "dynamic"),
    ("exported_sampling", "exported"),
)


if __name__ == "__main__":
    main()
