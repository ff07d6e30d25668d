"""Implement the programs in ``projects/megatron``. They take the arguments of Megatron-LM, and prepare
GPT-2's corpus, train, and show results.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from ppfleetx.commands.check import check_report, human_count
from ppfleetx.commands.initialize import start_with
from ppfleetx.commands.options import positive_int, whole_number
from ppfleetx.config.errors import ConfigError, DataError
from ppfleetx.config.loader import load_tree
from ppfleetx.config.sections.root import RunConfig
from ppfleetx.core.engine.check_output_dir import METRICS_FILE
from ppfleetx.data.prepare.corpus_reader import find_sources
from ppfleetx.data.prepare.preprocess import preprocess
from ppfleetx.data.tokenizer.tokenizer import Tokenizer
from ppfleetx.dialects.megatron import gpt2_script
from ppfleetx.dialects.megatron.dialect import of_arguments, without_launcher
from ppfleetx.dialects.translation import Translation
from ppfleetx.models.gpt.spec import parameter_count
from ppfleetx.utils.device_support import CPU, expected_device
from ppfleetx.utils.end_processes import LAUNCHER
from ppfleetx.utils.input_files import os_errors
from ppfleetx.utils.launcher_env import world_size
from ppfleetx.utils.output_files import atomic_write, is_taken, put_aside

USAGE = """\
usage: pretrain_gpt.py --num-layers N ...      Megatron's arguments; docs/dialects/megatron.md lists them
       python -m paddle.distributed.launch --nproc_per_node 8 pretrain_gpt.py ...
       pretrain_gpt.py --check [--world-size N] ...     print plan, parameters and batches, and run nothing
"""
_LOG = Path("test/output/0")


def run(argv: Sequence[str]) -> None:
    """Run ``projects/megatron/pretrain_gpt.py``: train with the arguments of Megatron-LM."""
    train_translated(argv or ["--help"], USAGE, of_arguments)


def train_translated(
    argv: Sequence[str], usage: str, translate: Callable[[list[str], int | None], Translation]
) -> None:
    """Train with the arguments of another toolkit. ``translate`` converts the arguments and the number of
    processes to our configuration. With ``--check``, only a report on the configuration is printed. With
    ``--help``, only ``usage`` is printed."""
    if "--help" in argv or "-h" in argv:
        print(usage, end="")
        return
    only_checks, world, rest = own_arguments(argv)
    result = translate(rest, world)
    cfg = load_tree(result.tree(), result.warnings, world_size=world)
    if only_checks:
        print(check_report(cfg))
        return
    cfg, ctx = start_with(cfg, reads=("Train", "Eval"))
    from ppfleetx.commands.train import train

    train(cfg, ctx)


def own_arguments(argv: Sequence[str]) -> tuple[bool, int | None, list[str]]:
    """Separate our arguments from those of the other toolkit. Returns (whether ``--check`` is given, number
    of processes or None, the other toolkit's arguments)."""
    checks, world, rest = False, None, []
    words = iter(argv)
    for word in words:
        if word == "--check":
            checks = True
        elif word.partition("=")[0] == "--world-size":
            text = word.partition("=")[2] or next(words, "")
            world = positive_int(text)
            if world is None:
                raise ConfigError("must be a number of at least 1", key="--world-size", value=text)
        else:
            rest.append(word)
    if world is not None and not checks:
        raise ConfigError("goes with --check; a run has the processes of its launcher", key="--world-size")
    if world is None:
        world = without_launcher(rest)[0] if checks else world_size()
    return checks, world, rest


def run_gpt2(argv: Sequence[str], *, evaluates: bool) -> int:
    """Run ``train_full_8p.sh`` or ``train_performance_8p.sh``: train on eight ranks, and print a table of
    results. The logs of an earlier run are renamed first. Its output directory is renamed too, unless this
    run resumes it. With ``--check``, only a report on the configuration is printed. ``evaluates`` is whether
    the run is evaluated during training. Returns the exit code."""
    checks = "--check" in argv
    request = gpt2_script.request_of([word for word in argv if word != "--check"])
    arguments = gpt2_script.arguments_of(request, evaluates=evaluates)
    result = of_arguments(arguments, gpt2_script.PROCESSES)
    cfg = load_tree(result.tree(), result.warnings, world_size=gpt2_script.PROCESSES)
    if checks:
        print(check_report(cfg))
        return 0
    output = Path(cfg.Engine.save_load.output_dir)
    _put_aside(_LOG)
    if not cfg.Engine.save_load.resume:
        _put_aside(output)
    _LOG.mkdir(parents=True, exist_ok=True)
    code = _launch(arguments)
    if code == 0:
        size = human_count(parameter_count(cfg.Model)) if request.more else request.size
        print(results_table(size, cfg, output))
    return code


def _put_aside(output: Path) -> None:
    if output.is_dir() and is_taken(output):
        print(f"the results of an earlier run are now in {put_aside(output)}", flush=True)


def _launch(arguments: Sequence[str]) -> int:
    program = Path(__file__).resolve().parents[2] / "projects" / "megatron" / "pretrain_gpt.py"
    command = [sys.executable, "-m", LAUNCHER, "--nproc_per_node", str(gpt2_script.PROCESSES)]
    command += ["--log_dir", str(_LOG), str(program), *arguments]
    with (_LOG / "train_0.log").open("wb") as log:
        started = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        try:
            for line in started.stdout:
                log.write(line)
                sys.stdout.write(line.decode("utf-8", "replace"))
                sys.stdout.flush()
            return started.wait()
        finally:
            if started.poll() is None:
                started.terminate()
                started.wait()


def results_table(size: str, cfg: RunConfig, output: Path) -> str:
    """Return a Markdown table of a finished run: parameters, perplexity, samples per second, sequence length
    and steps. The perplexity is the lowest of all evaluations after step 0; the speed is the mean of the last
    hundred records."""
    records = [json.loads(line) for line in (output / METRICS_FILE).read_text("utf-8").splitlines()]
    trained = [record for record in records if record["kind"] == "train"]
    ppls = [one["ppl"] for one in records if one["kind"] == "eval" and one["step"] > 0 and one["ppl"]]
    length = cfg.Data.Train.dataset.max_seq_len
    last = trained[-100:]
    speed = sum(record["ips_total"] for record in last) / len(last) / length
    cells = (
        f"{gpt2_script.PROCESSES}p-{'CPU' if expected_device(cfg.Global.device) == CPU else 'GPU'}",
        size,
        f"{min(ppls):.3f}" if ppls else "-",
        f"{speed:.3f}",
        str(length),
        str(trained[-1]["step"]),
    )
    head = ("NAME", "params", "PPL", "samples/s", "seq_len", "Steps")
    rows = [head, tuple("-----" for _ in head), cells]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


NAME = "my-gpt_text_sentence"
_VOCAB, _MERGES, _TEXT = "gpt2-vocab.json", "gpt2-merges.txt", "wiki_all.json"


def prepare_gpt2_corpus(argv: Sequence[str]) -> None:
    """Run ``dataset_preprocess_gpt.sh``: encode text with GPT-2's tokenizer into a corpus for training."""
    parser = argparse.ArgumentParser(prog="dataset_preprocess_gpt.sh", description=__doc__)
    add = parser.add_argument
    files = f"has {_VOCAB} and {_MERGES} (./data)"
    add("--output_dir", default="./data", type=Path, metavar="DIR", help=files)
    add("--input", type=Path, metavar="FILE", help=f'one {{"text": ...}} a line (DIR/{_TEXT})')
    add("--extracted", default="./text", type=Path, metavar="DIR", help="WikiExtractor's output (./text)")
    half = max(1, (os.cpu_count() or 2) // 2)
    add("--workers", type=whole_number, default=half, metavar="N", help="processes")
    args = parser.parse_args(list(argv))
    for name in (_VOCAB, _MERGES):
        if not (args.output_dir / name).is_file():
            raise DataError(
                f"{args.output_dir / name} is not there. Nothing is downloaded: take vocab.json and "
                "merges.txt of https://huggingface.co/openai-community/gpt2, under these names"
            )
    text = args.input or _text_to_encode(args.output_dir, args.extracted)
    print(_encode(text, args.output_dir, args.workers))


@os_errors(DataError)
def _text_to_encode(output_dir: Path, extracted: Path) -> Path:
    """Return the path of the text file to encode. If the file does not exist, it is made by joining the files
    in ``extracted``, the output directory of WikiExtractor."""
    text = output_dir / _TEXT
    if text.exists():
        return text
    parts = sorted(path for path in extracted.rglob("*") if path.is_file()) if extracted.is_dir() else []
    if not parts:
        raise DataError(
            f"there is no text: give --input FILE with one JSON object a line, put it at {text}, or let "
            f"WikiExtractor --json write a dump of Wikipedia to {extracted}"
        )
    with atomic_write(text, "wb") as file:
        for part in parts:
            with part.open("rb") as source:
                shutil.copyfileobj(source, file)
    print(f"{len(parts)} files of {extracted} are now {text}")
    return text


@os_errors(DataError)
def _encode(text: Path, output_dir: Path, workers: int) -> str:
    target = output_dir / NAME
    for suffix in (".bin", ".idx"):
        if Path(f"{target}{suffix}").exists():
            raise DataError(f"{target}{suffix} exists already; nothing is overwritten")
    tokenizer = Tokenizer.from_vocab_and_merges(str(output_dir / _VOCAB), str(output_dir / _MERGES))
    with tempfile.TemporaryDirectory(dir=output_dir, prefix=".preparing-") as scratch:
        report = preprocess(find_sources([str(text)]), Path(scratch) / "my-gpt", tokenizer, workers=workers)
        for path in sorted(Path(scratch).iterdir(), reverse=True):
            path.rename(output_dir / path.name.replace("my-gpt_text_document", NAME))
    report.outputs = [str(target)]
    return str(report)
