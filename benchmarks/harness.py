"""What the benchmarks share: the setup of a process, workers that take turns, clocks, and printed results.

Programs import this module before anything of the project, which it makes importable.
"""

from __future__ import annotations

import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

if TYPE_CHECKING:
    import numpy as np

    from ppfleetx.generation.decoding_session import NextTokenModel

TINY = ROOT / "ppfleetx/configs/nlp/gpt/pretrain_gpt_tiny.yaml"
Rates = dict[str, float]
"""``tokens_per_cpu_s`` and ``tokens_per_s`` of one run, and what else it found."""


def start_paddle() -> None:
    """Set the process up as the tools do, and import Paddle."""
    from ppfleetx.utils.process_env import import_paddle, prepare_process

    prepare_process()
    import_paddle()


def compile_operators() -> None:
    """Compile the operators for CPUs where that is possible."""
    subprocess.run([sys.executable, "-m", "ppfleetx.nn.cpu_ops", "--if-possible"], cwd=ROOT, check=True)


# -- clocks


class Clock:
    """CPU seconds of this process and seconds, since it was made or set back."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self._cpu, self._wall = time.process_time(), time.perf_counter()

    def read(self) -> tuple[float, float]:
        return time.process_time() - self._cpu, time.perf_counter() - self._wall

    def rates(self, tokens: int) -> Rates:
        """Of so many tokens in the time that :meth:`read` gives."""
        cpu, wall = self.read()
        return {"tokens_per_cpu_s": tokens / cpu, "tokens_per_s": tokens / wall}


def cpu_seconds(work: Callable[[], object]) -> float:
    """CPU time of one call."""
    clock = Clock()
    work()
    return clock.read()[0]


# -- processes


def of_threads(threads: int) -> dict[str, str]:
    """The environment of a process with so many threads."""
    return {**os.environ, "OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}


def result_of(program: str, words: Sequence[str], threads: int, python: str = sys.executable) -> Any:
    """What a worker of ``program`` prints as its last line, in JSON."""
    command = [python, program, *words]
    done = subprocess.run(command, env=of_threads(threads), stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


class Worker:
    """A process that keeps one mode's model and works when it is asked to: ``program --worker MODE``."""

    def __init__(
        self, program: str, mode: str, threads: int, *options: str, python: str = sys.executable
    ) -> None:
        self._process = subprocess.Popen(
            [python, program, "--worker", mode, *options],
            env=of_threads(threads),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, request: object) -> dict[str, Any]:
        self.start(request)
        return self.result()

    def start(self, request: object) -> None:
        """Send one line, which the worker answers with one of JSON."""
        self._process.stdin.write(f"{request}\n")
        self._process.stdin.flush()

    def result(self) -> dict[str, Any]:
        for line in self._process.stdout:
            if line.startswith("{"):
                return json.loads(line)
        raise SystemExit(f"a worker ended with code {self._process.wait()}")

    def close(self) -> None:
        self._process.stdin.close()
        self._process.wait()


def in_rounds(workers: Mapping[str, Worker], request: object, rounds: int) -> dict[str, list[dict[str, Any]]]:
    """One untimed round, then ``rounds`` timed ones, in which all workers do the same one after the other:
    what each found, round by round."""
    found = [{name: worker.run(request) for name, worker in workers.items()} for _ in range(rounds + 1)]
    return {name: [one[name] for one in found[1:]] for name in workers}


# -- results


def report(
    label: str, results: Mapping[str, Sequence[Rates]], compared: Sequence[tuple[str, str]] = ()
) -> None:
    """Print the rates of every mode, and the ratios of pairs of modes round by round."""
    for mode, runs in results.items():
        cpu = [run["tokens_per_cpu_s"] for run in runs]
        wall = statistics.median(run["tokens_per_s"] for run in runs)
        print(
            f"{label}  {mode:17} {statistics.median(cpu):8.2f} tokens per CPU second "
            f"({min(cpu):.2f} to {max(cpu):.2f}), {wall:.2f} per second"
        )
    for mode, reference in compared:
        if mode in results and reference in results:
            found = ratios(results[mode], results[reference], "tokens_per_cpu_s")
            print(f"{label}  {mode} / {reference}: {listed(found)}")
    sys.stdout.flush()


def ratios(runs: Sequence[Rates], others: Sequence[Rates], what: str) -> list[float]:
    """What ``runs`` found over what ``others`` found, round by round."""
    return [one[what] / other[what] for one, other in zip(runs, others, strict=True)]


def listed(numbers: Sequence[float]) -> str:
    """All of them and their median, as text."""
    return f"{', '.join(f'{n:.2f}' for n in numbers)}; median {statistics.median(numbers):.2f}"


def pyplot() -> Any:
    """Matplotlib without a screen."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


# -- models


def random_model(seed: int = 0, **sizes: Any) -> NextTokenModel:
    """This project's model with random weights; ``sizes`` are keys of ``Model``."""
    start_paddle()
    from ppfleetx.config.sections.root import ModelConfig
    from ppfleetx.generation.decoding_session import NextTokenModel
    from ppfleetx.models.gpt.stages import gpt_stages
    from ppfleetx.models.staged_model import StagedModel
    from ppfleetx.nn.layer_factory import InferenceFactory

    cfg = ModelConfig(**sizes)
    model = StagedModel(gpt_stages(cfg, InferenceFactory()), seed=seed)
    model.eval()
    return NextTokenModel(model, cfg.vocab_size)


def exported_program(
    next_token: NextTokenModel, positions: int, vocab: int, threads: int | None = None
) -> Callable[..., list[list[int]]]:
    """The same model as an exported program that Paddle Inference runs: ``run(tokens, padding, new, streams,
    seed=0, top_k=1, top_p=1.0, most_guesses=0)`` gives the new tokens of each row. Exporting takes a minute.
    """
    import numpy as np

    from ppfleetx.config.sections.root import InferenceConfig
    from ppfleetx.deploy.export_dir import PROGRAM
    from ppfleetx.deploy.inference_engine import Program
    from ppfleetx.deploy.static.program import save_program
    from ppfleetx.generation.gumbel_sampling import RandomStream

    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        save_program(next_token, positions, directory / PROGRAM)
        files = [path.name for path in directory.iterdir()]
        program = Program(directory, files, InferenceConfig(cpu_threads=threads), "cpu")

    def run(
        tokens: np.ndarray,
        padding: np.ndarray,
        new: int,
        streams: Sequence[int],
        *,
        seed: int = 0,
        top_k: int = 1,
        top_p: float = 1.0,
        most_guesses: int = 0,
    ) -> list[list[int]]:
        numbers = [RandomStream(seed, stream, 0, vocab).numbers(0, new) for stream in streams]
        return program.run(
            {
                "tokens": tokens,
                "padding": padding,
                "max_new_tokens": np.full(len(tokens), new),
                "exponentials": np.stack(numbers),
                "end_ids": np.array([-1]),
                "min_new_tokens": np.array([0]),
                "repetition_penalty": np.array([1.0], np.float32),
                "temperature": np.array([1.0], np.float32),
                "top_k": np.array([top_k]),
                "top_p": np.array([top_p], np.float32),
                "most_guesses": np.array([most_guesses]),
            }
        ).tolist()

    return run


# -- trainings


def micro_batch_of(tokens: np.ndarray) -> dict[str, np.ndarray]:
    """The micro batch in which all of ``tokens`` ``[rows, positions + 1]`` count."""
    import numpy as np

    rows, length = tokens[:, 1:].shape
    return {
        "tokens": tokens[:, :-1],
        "labels": tokens[:, 1:],
        "loss_mask": np.ones((rows, length), np.float32),
        "position_ids": np.broadcast_to(np.arange(length), (rows, length)),
    }


def records_of_run(
    config: Path, keys: Mapping[str, object], overrides: Sequence[str] = (), *, one_thread: bool = False
) -> list[dict[str, Any]] | None:
    """Train without checkpoints. Return the records of ``metrics.jsonl``; None if the run diverged."""
    with tempfile.TemporaryDirectory() as directory:
        own = {
            "Engine.logging_freq": 1,
            "Engine.save_load.save_steps": 0,
            "Engine.save_load.output_dir": directory,
        }
        given = [*(f"{key}={value}" for key, value in (own | {**keys}).items()), *overrides]
        done = subprocess.run(
            [sys.executable, str(ROOT / "tools/train.py"), "-c", str(config)]
            + [word for override in given for word in ("-o", override)],
            cwd=ROOT,
            env=os.environ | ({"OMP_NUM_THREADS": "1"} if one_thread else {}),
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            if re.search(r"not finite|\b(nan|inf)\b", done.stderr.lower()):
                return None
            raise SystemExit(done.stderr[-2000:])
        lines = (Path(directory) / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]
