"""What the server makes of requests that come together, against the same requests one after the other.

``python benchmarks/serving.py`` serves a GPT of 12 layers and hidden size 768 with random weights and 300
token ids, sends ``--requests`` prompts one after the other, then all at once, ``--pairs`` times in turn, and
prints one JSON line per run: tokens per second of the clock, tokens per CPU second of the server, and the
mean time to the first token. ``--url`` measures a server that is running already (no CPU seconds;
``PPFLEETX_API_KEY`` is sent).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path

from harness import ROOT

MODEL = {
    "vocab_size": 300,
    "hidden_size": 768,
    "num_layers": 12,
    "num_attention_heads": 12,
    "max_position_embeddings": 1024,
}
START_SECONDS = 120.0


def make_checkpoint(directory: Path) -> Path:
    """Random weights, and a tokenizer of few ids; gives the configuration."""
    from ppfleetx.checkpoint.manager import save_checkpoint
    from ppfleetx.checkpoint.state_dict import model_slices
    from ppfleetx.config.sections.root import ModelConfig
    from ppfleetx.data.tokenizer.tokenizer import train_tokenizer
    from ppfleetx.models.gpt.stages import gpt_stages
    from ppfleetx.models.staged_model import StagedModel
    from ppfleetx.nn.layer_factory import LocalFactory

    model = StagedModel(gpt_stages(ModelConfig(**MODEL), LocalFactory()))
    tokenizer = train_tokenizer(["some text to train on"], 300)
    tensors = model_slices([(parameter.info.name, parameter) for parameter in model.parameters()])
    train = {"step": 1, "epoch": 0, "consumed_samples": 1}
    save_checkpoint(
        directory / "run",
        epoch=0,
        step=1,
        tensors=tensors,
        state={"train": train},
        vocab_size=MODEL["vocab_size"],
        fingerprints={"tokenizer": tokenizer.fingerprint},
    )
    tokenizer.save(directory / "run" / "tokenizer")
    config = directory / "config.yaml"
    sections = {"Global": {"device": "cpu", "local_batch_size": 1}, "Model": MODEL}
    config.write_text(json.dumps(sections))
    return config


@contextlib.contextmanager
def served() -> Iterator[tuple[str, int]]:
    """URL and process id of a server of a model made for the purpose."""
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        # In a process of its own: its memory is gone when the server starts.
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
            config = pool.submit(make_checkpoint, directory).result()
        options = [f"Engine.save_load.ckpt_dir={directory / 'run'}", "Serve.port=0"]
        words = [word for option in options for word in ("-o", option)]
        program = [sys.executable, str(ROOT / "tools/serve.py"), "-c", str(config), *words]
        log = directory / "log"
        with log.open("wb") as output, subprocess.Popen(program, stdout=output) as server:
            try:
                yield wait_for_url(server, log), server.pid
            finally:
                server.send_signal(signal.SIGTERM)


def wait_for_url(server: subprocess.Popen, log: Path) -> str:
    end = time.monotonic() + START_SECONDS
    while time.monotonic() < end and server.poll() is None:
        found = re.search(r"serving .* on (http://\S+)", log.read_text())
        if found:
            return found.group(1)
        time.sleep(0.1)
    raise SystemExit(f"the server did not start:\n{log.read_text()}")


def ask(url: str, number: int, max_tokens: int) -> float:
    """One streamed request with a prompt of 64 tokens; seconds to its first token."""
    body = {
        "prompt": [(7 * number + place) % 250 for place in range(64)],
        "max_tokens": max_tokens,
        "min_tokens": max_tokens,
        "temperature": 0,
        "stream": True,
    }
    headers = {"Content-Type": "application/json"}
    if "PPFLEETX_API_KEY" in os.environ:
        headers["Authorization"] = f"Bearer {os.environ['PPFLEETX_API_KEY']}"
    request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode(), headers)
    began = time.monotonic()
    with urllib.request.urlopen(request, timeout=600) as answer:
        answer.readline()
        first = time.monotonic() - began
        assert answer.read().endswith(b"data: [DONE]\n\n")
    return first


def cpu_seconds(pid: int | None) -> float:
    if pid is None:
        return float("nan")
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measure(url: str, pid: int | None, args: argparse.Namespace, together: int) -> dict[str, object]:
    before, began = cpu_seconds(pid), time.monotonic()
    with ThreadPoolExecutor(together) as pool:
        firsts = list(pool.map(lambda number: ask(url, number, args.max_tokens), range(args.requests)))
    seconds, cpu = time.monotonic() - began, cpu_seconds(pid) - before
    tokens = args.requests * args.max_tokens
    result: dict[str, object] = {
        "together": together,
        "tokens_per_second": round(tokens / seconds, 1),
        "first_token_seconds": round(sum(firsts) / len(firsts), 3),
    }
    return result if pid is None else {**result, "tokens_per_cpu_second": round(tokens / cpu, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--url", help="a running server; default: one that is started for the purpose")
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--pairs", type=int, default=3)
    args = parser.parse_args()
    with contextlib.nullcontext((args.url, None)) if args.url else served() as (url, pid):
        ask(url, 0, 8)  # warm up
        for _ in range(args.pairs):
            for together in (1, args.requests):
                print(json.dumps(measure(url, pid, args, together)), flush=True)


if __name__ == "__main__":
    main()
