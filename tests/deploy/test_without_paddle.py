"""Every tool in a Python that has no Paddle: it does its work, or says in one sentence how to install it."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from ppfleetx.data.indexed_dataset import IndexedDatasetWriter
from ppfleetx.data.tokenizer.tokenizer import Tokenizer
from ppfleetx.deploy.export_dir import PROGRAM_FILE, WEIGHTS_FILE, ExportManifest, describe_files
from tests.deploy.exports import GPT2_STYLE, write_run

ROOT = Path(__file__).resolve().parents[2]
TOOLS = sorted(
    str(path.relative_to(ROOT)) for folder in ("tools", "tasks/gpt") for path in (ROOT / folder).glob("*.py")
)
MODULES = ["ppfleetx.nn.cpu_ops"]
NEEDS_PADDLE = [
    "tasks/gpt/generation.py",
    "tasks/gpt/inference.py",
    "tools/convert_checkpoint.py",
    "tools/doctor.py",
    "tools/eval.py",
    "tools/export.py",
    "tools/inference.py",
    "tools/serve.py",
    "tools/train.py",
    "ppfleetx.nn.cpu_ops",
]
SENTENCE = "error: Paddle is not installed in this Python: on a CPU run `pip install 'ppfleetx[cpu]'`"

# Runs each program in a fork of one process in which Paddle cannot be found.
DRIVER = """
import json, os, runpy, sys, tempfile
import matplotlib.pyplot, numpy, pydantic, rich, safetensors, tiktoken, tokenizers, yaml

class NoPaddle:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "paddle":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, NoPaddle())
for program, arguments in json.load(sys.stdin):
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        pid = os.fork()
        if pid == 0:
            os.dup2(out.fileno(), 1)
            os.dup2(err.fileno(), 2)
            sys.argv = [program, *arguments]
            code = 1
            try:
                if program.endswith(".py"):
                    runpy.run_path(program, run_name="__main__")
                else:
                    runpy.run_module(program, run_name="__main__", alter_sys=True)
                code = 0
            except SystemExit as end:
                code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
            except BaseException:
                sys.excepthook(*sys.exc_info())
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        out.seek(0), err.seek(0)
        print(json.dumps([program, code, out.read(), err.read()]), flush=True)
"""


def run(cases: dict[str, list[str]], directory: Path) -> dict[str, tuple[int, str, str]]:
    """(exit code, stdout, stderr) of each program with its arguments."""
    done = subprocess.run(
        [sys.executable, "-c", DRIVER],
        input=json.dumps([[str(ROOT / name) if "/" in name else name, more] for name, more in cases.items()]),
        cwd=directory,
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT), "HOME": str(directory)},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    results = [json.loads(line) for line in done.stdout.splitlines()]
    return {name: tuple(result[1:]) for name, result in zip(cases, results, strict=True)}


def write_export(run: Path, directory: Path) -> Path:
    """All that an exported model has but a program."""
    tokenizer = Tokenizer.load(run / "tokenizer")
    tokenizer.save(directory / "tokenizer")
    for name in (PROGRAM_FILE, WEIGHTS_FILE):
        (directory / name).write_text("")
    ExportManifest(
        vocab_size=300,
        end_id=0,
        end_token=tokenizer.decode([0]),
        max_positions=64,
        model=GPT2_STYLE,
        generation={},
        tokenizer_fingerprint=tokenizer.fingerprint,
        checkpoint="epoch_0_step_4",
        inputs={},
        paddle_version="3.3.1",
        files=describe_files(directory),
    ).write(directory)
    return directory


@pytest.fixture
def arguments(tmp_path: Path) -> dict[str, list[str]]:
    """What makes each tool do its work, as far as it comes without Paddle."""
    text, corpus, config = tmp_path / "text.jsonl", tmp_path / "corpus", tmp_path / "model.json"
    run = write_run(tmp_path / "run", GPT2_STYLE)
    export = write_export(run, tmp_path / "rank_0")
    sections = {"Global": {"device": "cpu", "local_batch_size": 2}, "Model": GPT2_STYLE}
    config.write_text(json.dumps(sections))
    text.write_text('{"text": "the cat and the hat"}\n' * 20)
    with IndexedDatasetWriter(corpus, np.uint16) as writer:
        for _ in range(40):
            writer.add_document(np.arange(20), [20])
    fleetx = np.arange(30, dtype=np.uint16)
    np.save(tmp_path / "old_ids.npy", fleetx)
    np.savez(tmp_path / "old_idx.npz", lens=np.array([10, 20]), docs=np.array([0, 1, 2]))
    metrics = tmp_path / "metrics.jsonl"
    record = {"kind": "train", "loss": 1.0, "grad_norm": 1.0, "lr": 0.1}
    metrics.write_text("".join(json.dumps({"step": step, **record}) + "\n" for step in (1, 2)))
    from_run = ["-c", str(config), "-o", f"Engine.save_load.ckpt_dir={run}"]
    on_export = ["-c", str(config), "-o", f"Inference.model_dir={export}", "-o", "Generation.prompt=the"]
    data = [
        word
        for mode in ("Train", "Eval")
        for key, value in (("input_dir", corpus), ("max_seq_len", 16), ("split", "[8,2,0]"))
        for word in ("-o", f"Data.{mode}.dataset.{key}={value}")
    ]
    return {
        "tasks/gpt/generation.py": [*from_run, "-o", "Generation.prompt=the"],
        "tasks/gpt/inference.py": on_export,
        "tasks/gpt/lm_eval_harness.py": [*from_run, "--tasks", "wikitext"],
        "tools/build_index.py": ["-c", str(config), *data, "-o", "Engine.max_steps=2"],
        "tools/convert_checkpoint.py": [
            *("--from", "ppfleetx", "--to", "hf", "--check-logits", "--config", str(config)),
            *("--input", str(run), "--output", str(tmp_path / "hf")),
        ],
        "tools/convert_fleetx_data.py": ["--input", str(tmp_path / "old"), "--output-prefix", "new"],
        "tools/doctor.py": ["-c", str(config), "-o", f"Engine.save_load.output_dir={tmp_path / 'new'}"],
        "tools/eval.py": [*from_run, *data],
        "tools/export.py": [*from_run, "-o", f"Engine.save_load.output_dir={tmp_path / 'export'}"],
        "tools/gen_command_docs.py": ["--check"],
        "tools/gen_config_docs.py": ["--check"],
        "tools/gen_planner_docs.py": ["--check"],
        "tools/gen_dialect_docs.py": ["--check"],
        "tools/gen_parallelism_docs.py": ["--check"],
        "tools/inference.py": on_export,
        "tools/inspect_checkpoint.py": ["--verify", str(run)],
        "tools/inspect_corpus.py": ["--verify", str(corpus)],
        "tools/loss_compare.py": ["--metrics-a", str(tmp_path), "--metrics-b", str(tmp_path)],
        "tools/make_stdlib_corpus.py": ["--output", str(tmp_path / "stdlib.jsonl")],
        "tools/merge_datasets.py": ["--input", str(corpus), str(corpus), "--output-prefix", "merged"],
        "tools/merge_lora.py": ["--input", str(run), "--output", str(tmp_path / "merged")],
        "tools/plan.py": ["-c", str(config), "--card", "A100-80GB"],
        "tools/plot_loss.py": ["--metrics", str(metrics), "--output", str(tmp_path / "loss.png")],
        "tools/prune.py": [str(run), "--ratio", "0.25", "--output", str(tmp_path / "pruned")],
        "tools/quantize.py": [str(run), "--to", "int8", "--output", str(tmp_path / "int8")],
        "tools/preprocess_data.py": [
            *("--input", str(text), "--tokenizer", str(run / "tokenizer")),
            *("--output-prefix", str(tmp_path / "tokens")),
        ],
        "tools/serve.py": [*from_run, "-o", "Serve.port=0"],
        "tools/supervise.py": ["--", "true"],
        "tools/train.py": ["-c", str(config), *data, "-o", f"Engine.save_load.output_dir={tmp_path / 'new'}"],
        "tools/translate.py": [str(ROOT / "projects/mindformers/configs/gpt2/run_gpt2.yaml")],
        "tools/train_tokenizer.py": ["--input", str(text), "--vocab-size", "270", "--output", "tokenizer"],
        "ppfleetx.nn.cpu_ops": [],
    }


@pytest.mark.slow
def test_every_tool_without_paddle(arguments: dict[str, list[str]], tmp_path: Path) -> None:
    assert set(arguments) == {*TOOLS, *MODULES}, "say here with which arguments a new tool does its work"
    results = run(arguments, tmp_path)
    for name, (code, output, errors) in results.items():
        told = f"{name} ended with {code}\n{output}\n{errors}"
        assert "Traceback" not in errors, told
        if name in NEEDS_PADDLE:
            assert code == 2 and errors.startswith(SENTENCE) and errors.count("\n") == 1, told
        elif name in ("tools/prune.py", "tools/quantize.py"):
            assert code == 2 and "does not say what network it is" in errors, told
        elif name == "tools/merge_lora.py":
            assert code == 2 and "was not trained with adapters" in errors, told
        elif name == "tasks/gpt/lm_eval_harness.py":
            assert code == 2 and ("lm_eval" in errors or errors.startswith(SENTENCE)), told
        else:
            assert code == 0, told


def test_every_usage_without_paddle(tmp_path: Path) -> None:
    for name, (code, output, errors) in run({n: ["--help"] for n in (*TOOLS, *MODULES)}, tmp_path).items():
        assert (code, errors) == (0, "") and output.startswith("usage: "), name
