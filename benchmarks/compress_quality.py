#!/usr/bin/env python3
"""What smaller models cost in quality: the numbers of docs/numerics.md, from nothing but this repository.

    python benchmarks/compress_quality.py --room DIR --hf-python PYTHON [--models quickstart ...]

In DIR, which may be anywhere and takes 3 GB: the quickstart's corpus and model; and two GPT-2s of
transformers (PYTHON has torch and transformers), one with random weights, one trained by PyTorch, which
`ppfleetx convert` reads. Each is quantized in every form, and pruned by a quarter; the quickstart's is then
trained a little more, without and with the whole model as its teacher, and the latter is quantized.
`ppfleetx eval` measures each on the same text, which no model was trained or calibrated on. Then each
generates 64 tokens after 64, one text, one thread, in rounds.

What is there already is not made again, so that it can be stopped and goes on. It takes an hour of one
core. The results are written into benchmarks/compress.json. ``--draw`` measures nothing, draws them into
docs/images/compress.png, and prints the tables of docs/numerics.md, without what was not measured.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness import ROOT, Worker, in_rounds, pyplot, ratios

RESULTS = ROOT / "benchmarks" / "compress.json"
CORPUS = "quickstart/data/stdlib_text_document"
HELD_OUT = 20  # one document of so many, at the end, is in no training; configurations say [95, 5, 0]
RATIO = 0.25
# Forms that compute the same with other numbers: their speed is measured once.
AS_FAST_AS = {"int4, GPTQ": "int4, nearest", "pruned, trained": "pruned", "pruned, distilled": "pruned"}

FORMS = {
    "int8": ["--to", "int8"],
    "W8A8": ["--to", "int8", "--smooth"],
    "int4, nearest": ["--to", "int4"],
    "int4, GPTQ": ["--to", "int4", "--method", "gptq"],
}


@dataclass(frozen=True)
class Model:
    """One of the models that are made smaller.

    Attributes:
        about: what it is.
        steps: of recovery after pruning; None: it is not trained further.
        recovery: options of these trainings.
        characters: of the text that is evaluated.
        samples: windows of 256 tokens that are calibrated on.
        rounds: of speed.
    """

    about: str
    steps: int | None = None
    recovery: list[str] = field(default_factory=list)
    characters: int = 100_000
    samples: int = 64
    rounds: int = 15


MODELS = {
    "quickstart": Model(
        "4 layers of 256, rotary positions, 380 steps of 2048 tokens",
        200,
        ["Optimizer.lr.max_lr=5e-4", "Optimizer.lr.min_lr=5e-5", "Optimizer.lr.warmup_steps=20"],
    ),
    "gpt2-random": Model(
        "GPT-2 of transformers, 12 layers of 768, random weights", characters=25_000, samples=16, rounds=3
    ),
    "gpt2-trained": Model("GPT-2 of transformers, 4 layers of 256, trained by PyTorch"),
}
SHAPES = {"gpt2-random": (12, 768, 0), "gpt2-trained": (4, 256, 400)}  # layers, hidden, steps
CONFIG = ROOT / "ppfleetx" / "configs" / "nlp" / "gpt" / "pretrain_gpt_tiny.yaml"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--room", type=Path, help="where everything is made")
    parser.add_argument("--draw", action="store_true", help="draw what was measured")
    parser.add_argument("--hf-python", default=sys.executable)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--only", choices=["quality", "speed"], help="do one of the two parts")
    parser.add_argument("--threads", type=int, default=2, help="of training")
    if sys.argv[1:2] == ["--worker"]:
        serve(sys.argv[2])
        return
    args = parser.parse_args()
    if args.draw:
        draw_results()
        return
    if args.room is None:
        parser.error("--room is missing")
    room = Room(args.room.resolve(), args.hf_python, args.threads)
    room.make_corpus()
    for name in args.models:
        if args.only != "speed":
            measure_quality(room, name)
        if args.only != "quality":
            measure_speed(room, name)


class Room:
    """The directory in which everything is made; commands run in it."""

    def __init__(self, path: Path, hf_python: str, threads: int) -> None:
        self.path, self._hf_python, self._threads = path, hf_python, threads
        path.mkdir(parents=True, exist_ok=True)

    def ppfleetx(self, *arguments: str) -> None:
        self.run([sys.executable, "-c", "from ppfleetx.commands.main import main; main()", *arguments])

    def run(self, command: list[str]) -> None:
        print("$", " ".join(command), flush=True)
        environ = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": str(self._threads)}
        with (self.path / "log").open("ab") as log:
            subprocess.run(command, cwd=self.path, env=environ, stdout=log, stderr=log, check=True)

    def made(self, name: str, *arguments: str) -> Path:
        """The directory ``name``, which a command with ``--output`` makes; whole, or not there."""
        if not (self.path / name).exists():
            shutil.rmtree(self.path / f"{name}.part", ignore_errors=True)
            self.ppfleetx(*arguments, "--output", f"{name}.part")
            (self.path / f"{name}.part").rename(self.path / name)
        return self.path / name

    def make_corpus(self) -> None:
        """The quickstart's."""
        if not (self.path / f"{CORPUS}.idx").exists():
            self.ppfleetx("stdlib-corpus", "--output", "quickstart/corpus.jsonl")
            tokenizer = ["--vocab-size", "8192", "--output", "quickstart/tokenizer", "--overwrite"]
            self.ppfleetx("tokenizer", "--input", "quickstart/corpus.jsonl", *tokenizer)
            encode = ["--tokenizer", "quickstart/tokenizer", "--output-prefix", "quickstart/data/stdlib"]
            self.ppfleetx("prepare", "--input", "quickstart/corpus.jsonl", *encode, "--append-eod")

    def held_out(self, characters: int) -> str:
        """A file of so many from the beginnings of documents that no model was trained on."""
        name = f"held_out_{characters}.txt"
        if not (self.path / name).exists():
            lines = (self.path / "quickstart/corpus.jsonl").read_text("utf-8").splitlines()
            texts = [json.loads(line)["text"] for line in lines[-(len(lines) // HELD_OUT) :]]
            each = characters // len(texts)
            (self.path / name).write_text("\n".join(text[:each] for text in texts), "utf-8")
        return name

    def whole_model(self, name: str) -> Path:
        """The model before anything is taken from it."""
        if name in SHAPES:
            if not (self.path / f"{name}.hf").exists():
                layers, hidden, steps = SHAPES[name]
                command = [self._hf_python, str(ROOT / "benchmarks" / "make_hf_gpt2.py")]
                command += ["--output", f"{name}.hf", "--tokenizer", "quickstart/tokenizer"]
                command += ["--layers", str(layers), "--hidden", str(hidden), "--steps", str(steps)]
                self.run([*command, "--corpus", f"{CORPUS}.bin"])
            return self.made(
                name, "convert", "--from", "hf", "--to", "ppfleetx", "--input", f"{name}.hf", "--check-logits"
            )
        run = self.path / name / "run"
        if not (run / "done").exists():
            self.ppfleetx("train", "-c", str(CONFIG), "-o", "Engine.save_load.resume=auto")
            (run / "done").touch()
        return run


def measure_quality(room: Room, name: str) -> None:
    """Make every form of a model and write its size, loss and perplexity into the results."""
    whole = room.whole_model(name)
    model = MODELS[name]
    record(name, "float32", evaluated(room, name, whole, f"{name}.eval"))
    for form, options in FORMS.items():
        quantised(room, name, form, whole, options)
    pruned = room.made(f"{name}.pruned", "prune", str(whole), "--ratio", str(RATIO))
    record(name, "pruned", evaluated(room, name, pruned, f"{name}.pruned.eval"))
    if model.steps is None:
        return
    trainings = {
        "pruned, trained": (pruned, []),
        "pruned, distilled": (pruned, [f"Compress.Distill.teacher={whole}"]),
    }
    for form, (start, more) in trainings.items():
        recovered = _trained(room, name, form, start, more)
        record(name, form, evaluated(room, name, recovered, f"{recovered.name}.eval"))
    quantised(room, name, "pruned, distilled, int8", recovered, FORMS["int8"])


def _trained(room: Room, name: str, form: str, start: Path, more: list[str]) -> Path:
    model = MODELS[name]
    limits = [f"Engine.max_steps={model.steps}", "Engine.eval_freq=100", "Engine.save_load.save_steps=100"]
    options = [text for value in (*limits, *model.recovery, *more) for text in ("-o", value)]
    return room.made(f"{name}.{_plain(form)}", "finetune", "--from", str(start), *options)


def quantised(room: Room, name: str, form: str, source: Path, options: list[str]) -> None:
    """One form of quantization, made and measured."""
    place = f"{name}.{_plain(form)}"
    calibration = ["--calibration", CORPUS, "--samples", str(MODELS[name].samples)]
    small = room.made(place, "quantize", str(source), *options, *calibration)
    layers = json.loads((small / "quantization.json").read_text())["layers"]
    errors = [layer["output_error"] for layer in layers if layer["output_error"] is not None]
    found = evaluated(room, name, small, f"{place}.eval")
    record(name, form, {**found, "output_error": round(statistics.mean(errors), 5)})


def evaluated(room: Room, name: str, checkpoint: Path, place: str) -> dict[str, float]:
    """MB of all weights; loss and perplexity of the text that was held out."""
    text = room.held_out(MODELS[name].characters)
    windows = ("max_seq_len=256", "overlapping_eval=256", "batch_size=4")
    options = [part for option in windows for part in ("-o", f"Offline_Eval.{option}")]
    result = room.made(place, "eval", str(checkpoint), "--text", text, *options)
    found = json.loads((result / "eval_result.json").read_text())
    return {
        "mb": round(_num_bytes(checkpoint) / 1e6, 2),
        "loss": round(found["loss"], 5),
        "perplexity": round(math.exp(found["loss"]), 3),
        "tokens": found["num_tokens"] - 1,
    }


def _num_bytes(checkpoint: Path) -> int:
    from ppfleetx.checkpoint.resolve_checkpoint import open_resolved, resolve_checkpoint

    found = open_resolved(resolve_checkpoint(str(checkpoint), verify=False))
    model = [found.entry(name) for name in found.names()]
    sizes = {"F32": 4, "I8": 1, "U8": 1}
    return sum(math.prod(entry.shape) * sizes[entry.dtype] for entry in model)


def measure_speed(room: Room, name: str) -> None:
    """Tokens per CPU second of every form that is there, in rounds."""
    rows = read_results()["models"][name]["rows"]
    places = {"float32": room.whole_model(name)} | {
        form: room.path / f"{name}.{_plain(form)}"
        for form in rows
        if form != "float32" and form not in AS_FAST_AS
    }
    workers = {form: Worker(__file__, str(place), 1) for form, place in places.items()}
    try:
        measured = in_rounds(workers, 1, MODELS[name].rounds)
    finally:
        for worker in workers.values():
            worker.close()
    for form in rows:
        runs = measured[AS_FAST_AS.get(form, form)]
        ratio = statistics.median(ratios(runs, measured["float32"], "tokens_per_cpu_s"))
        speed = statistics.median(run["tokens_per_cpu_s"] for run in runs)
        record(name, form, {"tokens_per_cpu_second": round(speed, 1), "times_float32": round(ratio, 2)})


def serve(checkpoint: str) -> None:
    """In a worker: generate with a checkpoint when asked to."""
    from contextlib import ExitStack

    import decode

    from ppfleetx.commands.generate import load_generator
    from ppfleetx.commands.initialize import start_with
    from ppfleetx.commands.resolve_model import resolve_model
    from ppfleetx.config.loader import load_config

    with ExitStack() as stack:
        place = resolve_model(checkpoint, stack)
        cfg, ctx = start_with(load_config(place.config, place.overrides()))
        model = load_generator(cfg, ctx).next_token_model
    generate = decode.ours(1, model=lambda: model)
    vocab = cfg.Model.vocab_size
    decode.serve(lambda prompts: generate([[token % vocab for token in prompt] for prompt in prompts]))


def read_results() -> dict[str, Any]:
    return json.loads(RESULTS.read_text("utf-8")) if RESULTS.exists() else {"models": {}}


def record(name: str, form: str, values: dict[str, float]) -> None:
    """Put numbers of one form of a model into the results, and print them."""
    results = read_results()
    model = results["models"].setdefault(name, {"about": MODELS[name].about, "rows": {}})
    model["rows"].setdefault(form, {}).update(values)
    RESULTS.write_text(json.dumps(results, indent=1) + "\n", "utf-8")
    print(name, form, model["rows"][form], flush=True)


def _plain(form: str) -> str:
    return form.replace(",", "").replace(" ", "-")


# -- what docs/numerics.md shows

PICTURE = ROOT / "docs" / "images" / "compress.png"
COLUMNS = {
    "mb": ("MB", "{:.1f}"),
    "perplexity": ("perplexity", "{:.2f}"),
    "change": ("change", "{:+.2%}"),
    "output_error": ("error of a layer", "{:.2%}"),
    "tokens_per_cpu_second": ("tokens per CPU second", "{:.0f}"),
    "times_float32": ("over float32", "{:.2f}"),
}
LEARNED = 8.0
DRAWN = ("change", "times_float32")
COLOURS = {"float32": "#333333", "pruned": "#b35900", "int4": "#0b6e4f", "int8": "#1f5fa8", "W8A8": "#1f5fa8"}

Rows = dict[str, dict[str, float]]


def draw_results() -> None:
    """Print the table of each model, and draw those that have learned anything."""
    drawn = {}
    for name, model in read_results()["models"].items():
        rows = with_change(model["rows"])
        print(f"{name}: {model['about']}\n\n{table(rows)}\n")
        has_learned = rows["float32"]["loss"] < LEARNED  # what guesses at random has no quality to lose
        if has_learned and all(key in row for row in rows.values() for key in DRAWN):
            drawn[model["about"]] = rows
    draw(drawn)


def with_change(rows: Rows) -> Rows:
    """With the change of perplexity against float32, as a share."""
    whole = rows["float32"]["perplexity"]
    return {form: {**row, "change": row["perplexity"] / whole - 1} for form, row in rows.items()}


def table(rows: Rows) -> str:
    """The rows as Markdown."""
    columns = {key: value for key, value in COLUMNS.items() if any(key in row for row in rows.values())}
    lines = [
        "| | " + " | ".join(title for title, _ in columns.values()) + " |",
        "|---" * (len(columns) + 1) + "|",
    ]
    for form, row in rows.items():
        empty = {"change", "times_float32"} if form == "float32" else ()
        cells = [
            text.format(row[key]) if key in row and key not in empty else ""
            for key, (_, text) in columns.items()
        ]
        lines.append("| " + " | ".join([form, *cells]) + " |")
    return "\n".join(lines)


def draw(models: dict[str, Rows]) -> None:
    """Change of perplexity against speed, a panel for each model."""
    figure, panels = pyplot().subplots(1, len(models), figsize=(4.6 * len(models) + 1, 4), squeeze=False)
    for axes, (about, rows) in zip(panels[0], models.items(), strict=True):
        _draw_panel(axes, rows)
        axes.set_title(about, fontsize=10)
        axes.set_xlabel("tokens per CPU second, over float32 (one text, one thread)")
    panels[0][0].set_ylabel("change of perplexity, %")
    figure.tight_layout()
    PICTURE.parent.mkdir(exist_ok=True)
    figure.savefig(PICTURE, dpi=110, metadata={"Software": None})


def _draw_panel(axes: Any, rows: Rows) -> None:
    """Points, and aslant beside them their names, together where points lie in one place."""
    points = {form: (row["times_float32"], 100 * row["change"]) for form, row in rows.items()}
    xs, ys = zip(*points.values(), strict=True)
    width, height = max(xs) - min(xs), max(ys) - min(ys)
    axes.set_xlim(min(xs) - 0.1 * width, max(xs) + 0.35 * width)
    axes.set_ylim(min(ys) - 0.15 * height, max(ys) + 0.4 * height)
    names: dict[tuple[float, float], list[str]] = {}
    for form, (x, y) in points.items():
        axes.scatter(
            [x], [y], s=160 * rows[form]["mb"] / rows["float32"]["mb"], color=_colour_of(form), alpha=0.7
        )
        near = (at for at in names if abs(at[0] - x) < 0.01 * width and abs(at[1] - y) < 0.03 * height)
        names.setdefault(next(near, (x, y)), []).append(form)
    for place, found in names.items():
        below = any(
            0 < place[0] - at[0] < 0.05 * width and abs(at[1] - place[1]) < 0.05 * height for at in names
        )
        axes.annotate(
            " / ".join(found),
            place,
            textcoords="offset points",
            xytext=(4, -5) if below else (4, 5),
            rotation=-25 if below else 25,
            rotation_mode="anchor",
            verticalalignment="top" if below else "baseline",
            fontsize=8.5,
            color=_colour_of(found[0]),
        )
    axes.grid(alpha=0.3)


def _colour_of(form: str) -> str:
    return next(colour for key, colour in COLOURS.items() if key in form)


if __name__ == "__main__":
    main()
