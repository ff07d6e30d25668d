"""Bad files of other programs to the public tools: each has to be refused in words, soon, in little memory.

``python -m tests.faults.hostile_campaign`` gives each case of `hostile_files` to every tool that would read
it, as a process of its own. It reports tracebacks, too much memory or time, and whether anything that was
planted has run.
"""

from __future__ import annotations

import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
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
from tests.e2e.program import NANO, ROOT
from tests.faults.harness import Ended, command_line, conclude, run_to_end
from tests.faults.hostile_files import FLEETX, HF, MEGATRON, OURS, TOKENIZER, Case, all_cases

GOLDEN_NETWORK = {
    "Model.vocab_size": 97,
    "Model.vocab_size_divisible_unit": 1,
    "Model.hidden_size": 32,
    "Model.max_position_embeddings": 24,
    "Data.Train.dataset.max_seq_len": 16,
    "Data.Eval.dataset.max_seq_len": 16,
}
# The tools that read a kind of directory. Those that load Paddle first get fewer cases.
TOOLS = {
    HF: ("from_hf", "init_from"),
    FLEETX: ("from_fleetx", "verify", "init_from"),
    MEGATRON: ("from_megatron", "init_from"),
    OURS: ("verify", "merge", "ckpt_dir"),
    TOKENIZER: ("encode", "generate"),
}
WITH_PADDLE = ("init_from", "ckpt_dir", "generate")
REFUSED, DAMAGED = 2, 1


def complaint(case: Case, tool: str, end: Ended) -> str | None:
    """What is wrong with how a tool took a case; None: nothing."""
    if case.is_sound:
        has_to_be_converted = tool == "init_from" and case.kind in (HF, MEGATRON)
        return end.complaint((REFUSED if has_to_be_converted else 0,), in_words=False)
    codes = [REFUSED]
    if tool == "verify":
        codes.append(DAMAGED)
    if case.may_pass or (tool == "verify" and case.is_readable):
        codes.append(0)
    return end.complaint(codes, in_words=tool != "verify")


class Programs:
    """Command lines of the tools, and what they need besides the bad directory."""

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
        work = self._work
        if tool == "verify":
            return self._words("tools/inspect_checkpoint.py", directory, "--verify")
        if tool == "encode":
            text = ("--input", work / "text.txt", "--output-prefix", out, "--workers", "1")
            return self._words("tools/preprocess_data.py", *text, "--tokenizer", directory)
        if tool == "merge" or tool.startswith("from_"):
            source = "ppfleetx" if tool == "merge" else tool.removeprefix("from_")
            more = {"merge": ["--merge"], "from_fleetx": ["--config", self._network]}.get(tool, [])
            names = ("--from", source, "--to", "ppfleetx", *more)
            return self._words("tools/convert_checkpoint.py", *names, "--input", directory, "--output", out)
        if tool == "generate":
            program = "tasks/gpt/generation.py"
            given = {"Engine.save_load.ckpt_dir": work / "nano", "Data.tokenizer.dir": directory}
            given |= {"Generation.prompt": "Hello", "Generation.max_dec_len": 4}
        else:
            program = "tools/train.py"
            given = {f"Engine.save_load.{tool}": directory, "Engine.save_load.output_dir": out}
            given |= {f"Data.{mode}.dataset.input_dir": work / "corpus" for mode in ("Train", "Eval")}
            given |= {**GOLDEN_NETWORK, "Engine.max_steps": 3}
        overrides = [word for key, value in given.items() for word in ("-o", f"{key}={value}")]
        return self._words(program, "-c", NANO, *overrides)

    def _words(self, program: str, *arguments: object) -> list[str]:
        return [str(ROOT / program), *map(str, arguments)]


def campaign(cases: Sequence[Case], work: Path, *, paddle_every: int) -> tuple[Counter[str], list[str]]:
    """Run all cases; how often which tool ended with what, and a line for each wrong end.

    Tools with Paddle get sound cases and each ``paddle_every``-th other one; 0: none.
    """
    programs, ends, problems = Programs(work), Counter(), []
    for number, case in enumerate(cases):
        with_paddle = paddle_every and (case.is_sound or number % paddle_every == 0)
        for tool in TOOLS[case.kind]:
            if tool in WITH_PADDLE and not with_paddle:
                continue
            with tempfile.TemporaryDirectory(dir=work, prefix="case-") as name:
                directory = Path(name) / "bad"
                directory.mkdir()
                case.make(directory)
                command = programs.command(tool, directory, Path(name) / "out")
                end = run_to_end(command, work / "said.txt", cwd=work)
            ends[f"{tool} ended with {end.code}"] += 1
            if problem := complaint(case, tool, end):
                problems.append(f"{case.name} ({tool}): {problem}: {end}")
                print(problems[-1], flush=True)
    return ends, problems


def main() -> int:
    parser = command_line(__doc__)
    parser.add_argument("--only", default="", help="cases whose name holds this")
    parser.add_argument("--paddle-every", type=int, default=8, help="one in so many goes to Paddle too")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="hostile-") as name:
        work = Path(name)
        canary = work / "canary"
        cases = [case for case in all_cases(canary, args.seed) if args.only in case.name]
        ends, problems = campaign(cases, work, paddle_every=args.paddle_every)
        if canary.exists():
            problems.append("something that was planted has run")
    bad = sum(not case.is_sound for case in cases)
    return conclude(ends, problems, f"{bad} bad directories, {ends.total()} runs, {len(problems)} problems")


if __name__ == "__main__":
    sys.exit(main())
