"""Hostile foreign files to the public tools: each has to be refused in words, soon, in little memory.

``python -m tests.faults.hostile_campaign`` gives each case of `hostile_files` to every tool that would read
it, as a process of its own with a limit on its memory. It reports tracebacks, the largest memory and longest
time, and whether anything that was planted has run.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import yaml

from ppfleetx.checkpoint.slices import whole
from ppfleetx.config.loader import load_config
from ppfleetx.conversion.huggingface.config_keys import model_keys
from ppfleetx.data.indexed import IndexedDatasetWriter
from ppfleetx.models.gpt.spec import parameter_shapes
from tests.checkpoint.checkpoints import save
from tests.conversion import hf_dirs
from tests.faults.hostile_files import FLEETX, HF, MEGATRON, OURS, TOKENIZER, Case, all_cases

ROOT = Path(__file__).resolve().parents[2]
NANO = ROOT / "ppfleetx/configs/debug/gpt_nano.yaml"
GOLDEN_NETWORK = {
    "Model.vocab_size": 97,
    "Model.vocab_size_divisible_unit": 1,
    "Model.hidden_size": 32,
    "Model.max_position_embeddings": 24,
    "Data.Train.dataset.max_seq_len": 16,
    "Data.Eval.dataset.max_seq_len": 16,
}
MAX_SECONDS, MAX_BYTES = 20.0, 10**9
_ADDRESSES = 3 << 29  # of a tool without Paddle, whose libraries alone take more
_PATIENCE = 90.0  # seconds until a tool is ended that has its time to itself
_DROP_CAPABILITY = 24  # PR_CAPBSET_DROP of prctl(2)
_READ_EVERYTHING = (1, 2)  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH

# The tools that read a kind of directory. Those in the second half load Paddle first, and get fewer cases.
TOOLS = {
    HF: ("from_hf", "init_from"),
    FLEETX: ("from_fleetx", "verify", "init_from"),
    MEGATRON: ("from_megatron", "init_from"),
    OURS: ("verify", "merge", "ckpt_dir"),
    TOKENIZER: ("encode", "generate"),
}
WITH_PADDLE = ("init_from", "ckpt_dir", "generate")
REFUSED, DAMAGED = 2, 1


@dataclass(frozen=True)
class Outcome:
    """What became of one tool.

    Attributes:
        tool: which.
        code: its exit code; negative: the signal that ended it.
        text: what it said.
        seconds: of the clock, from start to end.
        cpu_seconds: of the CPUs, that other programs have no part in.
        num_bytes: most memory it had.
    """

    tool: str
    code: int
    text: str
    seconds: float
    cpu_seconds: float
    num_bytes: int

    def problem(self, case: Case) -> str | None:
        """What is not as it has to be, if anything."""
        if "Traceback" in self.text or "Fatal Python error" in self.text:
            return "a traceback"
        if self.code == -signal.SIGKILL or self.cpu_seconds > MAX_SECONDS:
            return f"{self.seconds:.0f} seconds, {self.cpu_seconds:.0f} of the CPU"
        if self.num_bytes > MAX_BYTES:
            return f"{self.num_bytes >> 20} MiB"
        if case.is_sound:
            has_to_be_converted = self.tool == "init_from" and case.kind in (HF, MEGATRON)
            is_right = self.code == (REFUSED if has_to_be_converted else 0)
        elif self.tool == "verify":
            is_right = self.code in (REFUSED, DAMAGED) or (case.is_readable and self.code == 0)
        else:
            is_right = (
                self.code == REFUSED and self.text.startswith("error: ") + self.text.count("\nerror: ") == 1
            )
        if not is_right and not (case.may_pass and self.code == 0):
            return f"exit code {self.code}"
        return None


class Programs:
    """Command lines of the tools, and what they need besides the hostile directory."""

    def __init__(self, work: Path) -> None:
        self._work = work
        config, _ = hf_dirs.golden("hf_gpt2")
        self._network = work / "network.yaml"
        sections = {"Global": {"local_batch_size": 1}, "Model": model_keys(config)}
        self._network.write_text(yaml.safe_dump(sections))
        (work / "corpus").mkdir()
        with IndexedDatasetWriter(work / "corpus" / "toy", np.uint16) as corpus:
            for length in range(40, 90):
                corpus.add_document(np.arange(length) % 97, [length])
        shapes = parameter_shapes(load_config(NANO).Model)
        save(work / "nano", tensors=[whole(n, np.zeros(shape, np.float32)) for n, shape in shapes.items()])
        (work / "text.txt").write_text("some text\n" * 20)

    def command(self, tool: str, directory: Path, out: Path) -> list[str]:
        """The command that gives a directory to a tool."""
        if tool in ("from_hf", "from_fleetx", "from_megatron"):
            source = tool.removeprefix("from_")
            network = ["--config", str(self._network)] if source == "fleetx" else []
            names = ["--from", source, "--to", "ppfleetx", *network]
            return self._tool("convert_checkpoint", *names, "--input", directory, "--output", out)
        if tool == "merge":
            names = ["--from", "ppfleetx", "--to", "ppfleetx", "--merge"]
            return self._tool("convert_checkpoint", *names, "--input", directory, "--output", out)
        if tool == "verify":
            return self._tool("inspect_checkpoint", directory, "--verify")
        if tool == "encode":
            text = ["--input", self._work / "text.txt", "--output-prefix", out, "--workers", "1"]
            return self._tool("preprocess_data", *text, "--tokenizer", directory)
        if tool == "generate":
            given = {"Engine.save_load.ckpt_dir": self._work / "nano", "Data.tokenizer.dir": directory}
            given |= {"Generation.prompt": "Hello", "Generation.max_dec_len": 4}
            return self._program("tasks/gpt/generation.py", given)
        given = {f"Engine.save_load.{tool}": directory, "Engine.save_load.output_dir": out}
        data = {f"Data.{mode}.dataset.input_dir": self._work / "corpus" for mode in ("Train", "Eval")}
        return self._program("tools/train.py", {**given, **data, **GOLDEN_NETWORK, "Engine.max_steps": 3})

    def _tool(self, name: str, *arguments: object) -> list[str]:
        return [sys.executable, str(ROOT / "tools" / f"{name}.py"), *map(str, arguments)]

    def _program(self, path: str, values: Mapping[str, object]) -> list[str]:
        overrides = [word for key, value in values.items() for word in ("-o", f"{key}={value}")]
        return [sys.executable, str(ROOT / path), "-c", str(NANO), *overrides]


def run(tool: str, command: Sequence[str], work: Path) -> Outcome:
    """Run a tool to its end, or to the end of its time."""
    addresses = None if tool in WITH_PADDLE else _ADDRESSES

    def limit() -> None:
        if os.geteuid() == 0:  # root reads everything, whatever its permissions
            for capability in _READ_EVERYTHING:
                ctypes.CDLL(None).prctl(_DROP_CAPABILITY, capability, 0, 0, 0)
        if addresses is not None:
            resource.setrlimit(resource.RLIMIT_AS, (addresses, addresses))

    said = work / "said.txt"
    begun = time.monotonic()
    with said.open("wb") as output:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, cwd=work, preexec_fn=limit
        )
        timer = threading.Timer(_PATIENCE, process.kill)
        timer.start()
        _, status, usage = os.wait4(process.pid, 0)
        timer.cancel()
    process.returncode = os.waitstatus_to_exitcode(status)
    text = said.read_text(errors="replace")[-20_000:]
    seconds = time.monotonic() - begun
    cpu_seconds = usage.ru_utime + usage.ru_stime
    return Outcome(tool, process.returncode, text, seconds, cpu_seconds, usage.ru_maxrss * 1024)


def tools_for(case: Case, number: int, every: int) -> list[str]:
    """The tools for a case: all that are quick, and those with Paddle for each ``every``-th one (0: none)."""
    with_paddle = every and (case.is_sound or number % every == 0)
    return [tool for tool in TOOLS[case.kind] if with_paddle or tool not in WITH_PADDLE]


def campaign(cases: Sequence[Case], work: Path, *, paddle_every: int) -> tuple[list[Outcome], list[str]]:
    """Run all cases; the outcomes, and a line for each that is not as it has to be."""
    programs, outcomes, problems = Programs(work), [], []
    for number, case in enumerate(cases):
        for tool in tools_for(case, number, paddle_every):
            with tempfile.TemporaryDirectory(dir=work, prefix="case-") as name:
                directory = Path(name) / "hostile"
                directory.mkdir()
                case.make(directory)
                command = programs.command(tool, directory, Path(name) / "out")
                outcome = run(tool, command, work)
            outcomes.append(outcome)
            problem = outcome.problem(case)
            if problem is not None:
                last = (outcome.text.strip().splitlines() or ["nothing said"])[-1]
                problems.append(f"{case.name} ({tool}): {problem}; it said: {last[:300]}")
                print(problems[-1], flush=True)
    return outcomes, problems


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="cases whose name holds this")
    parser.add_argument("--paddle-every", type=int, default=8, help="one in so many goes to Paddle too")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="hostile-") as name:
        work = Path(name)
        canary = work / "canary"
        cases = [case for case in all_cases(canary, args.seed) if args.only in case.name]
        outcomes, problems = campaign(cases, work, paddle_every=args.paddle_every)
        if canary.exists():
            problems.append("something that was planted has run")
            print(problems[-1])
    counts = Counter(f"{outcome.tool} ended with {outcome.code}" for outcome in outcomes)
    for what, count in sorted(counts.items()):
        print(f"{count:4d} {what}")
    hostile = sum(not case.is_sound for case in cases)
    print(f"{hostile} hostile directories, {len(outcomes)} runs of tools, {len(problems)} problems")
    for with_paddle in (False, True):
        of_kind = [o for o in outcomes if (o.tool in WITH_PADDLE) == with_paddle]
        if of_kind:
            memory, seconds = max(o.num_bytes for o in of_kind), max(o.seconds for o in of_kind)
            cpu_seconds = max(o.cpu_seconds for o in of_kind)
            what = "with Paddle" if with_paddle else "without Paddle"
            print(f"{what}: at most {memory / 1e6:.0f} MB, {seconds:.1f} s, {cpu_seconds:.1f} s of the CPU")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
