"""Implement ``ppfleetx report``, which writes a report on a run as a Markdown and an HTML page."""

from __future__ import annotations

import html
import json
import math
import re
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from ppfleetx.checkpoint.inspect import summary
from ppfleetx.checkpoint.resolve_checkpoint import complete_checkpoints, open_named
from ppfleetx.checkpoint.run_ownership import read_run
from ppfleetx.commands.check import check_report
from ppfleetx.commands.loss_curves import (
    Record,
    draw_losses,
    import_pyplot,
    number,
    read_records,
    save_figure,
    series_of,
)
from ppfleetx.commands.options import refuse_not_positive
from ppfleetx.config.errors import DataError, UserError
from ppfleetx.config.loader import load_config
from ppfleetx.config.message_text import bytes_text
from ppfleetx.config.sections.root import RunConfig, data_sets
from ppfleetx.core.engine.check_output_dir import CONFIG_FILE, METRICS_FILE
from ppfleetx.data.build import build_dataloader, load_tokenizer
from ppfleetx.data.tokenizer.tokenizer import Tokenizer
from ppfleetx.utils.output_files import atomic_write, refuse_unwritable

if TYPE_CHECKING:
    from ppfleetx.commands.train_verbs import Report

SAMPLES_FILE = "samples.jsonl"
_MOST_EVALUATIONS = 20  # the latest of each set
_STYLE = (
    "body{font:16px/1.5 sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color:#222}"
    "svg{max-width:100%;height:auto}table{border-collapse:collapse}"
    "td,th{border:1px solid #ccc;padding:.2rem .6rem;text-align:left}"
    "pre{overflow-x:auto;background:#f5f5f5;padding:1rem;font-size:13px;white-space:pre-wrap}"
)


@dataclass(frozen=True)
class RunFiles:
    """The data that the report reads from a run's directory.

    Attributes:
        cfg: the run's configuration, resolved for its number of processes.
        records: the records of steps and evaluations in ``metrics.jsonl``.
    """

    directory: Path
    cfg: RunConfig
    records: list[Record]

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer stored in the run's directory, or else the tokenizer that the configuration names."""
        own = self.directory / "tokenizer"
        found = Tokenizer.load(own) if own.is_dir() else load_tokenizer(self.cfg)
        if found is None:
            raise DataError("the run has no tokenizer (Data.tokenizer)")
        return found

    def of_kind(self, kind: str) -> list[Record]:
        """Return the records of one kind, such as ``train`` or ``eval``, oldest first."""
        return [record for record in self.records if record["kind"] == kind]

    @property
    def seconds(self) -> float:
        """The total time of the run's steps and evaluations, in seconds. If an interruption left steps
        without a record, each is assumed to take as long as a step of the next record.
        """
        steps, total = self.of_kind("train"), sum(record["seconds"] for record in self.of_kind("eval"))
        # Steps before the first record may have been trained in another directory, so they do not count.
        # Later gaps are steps of this run that an interruption left without a record. Old records do not
        # have num_steps, the number of steps that they cover.
        first = steps[0]
        last = max(0, first["step"] - first.get("num_steps", self.cfg.Engine.logging_freq))
        for record in steps:
            total += record["batch_cost"] * (record["step"] - last)
            last = record["step"]
        return total


@dataclass(frozen=True)
class Section:
    """A section of the report.

    Attributes:
        pictures: paths of SVG files.
        table: rows of cells; the first row is the header.
        texts: blocks of text to show in a fixed-width font.
        note: a sentence at the end of the section.
    """

    title: str
    pictures: Sequence[Path] = ()
    table: Sequence[Sequence[str]] = ()
    texts: Sequence[str] = ()
    note: str = ""


def report(options: Report) -> None:
    refuse_not_positive(options, "price")
    run = read_run_files(options.directory)
    for path in write_report(run, options.output or options.directory / "report", options.price):
        print(f"report: {path}")


def read_run_files(directory: Path) -> RunFiles:
    """Read configuration and metrics from the directory of a run. The run may still be training. Raises
    DataError if a file is missing."""
    for name in (METRICS_FILE, CONFIG_FILE):
        if not (directory / name).is_file():
            raise DataError(f"{directory} is not the directory of a run that has trained: it has no {name}")
    records = read_records(directory)
    cfg = load_config(directory / CONFIG_FILE)
    last = [record for record in records if record["kind"] == "train"][-1]
    replicas = round(last["ips_total"] / last["ips"]) // cfg.plan.data_size  # dp_degree may be unset
    if replicas > 1:
        cfg = load_config(directory / CONFIG_FILE, world_size=cfg.plan.world_size * replicas)
    return RunFiles(directory, cfg, records)


def write_report(run: RunFiles, output: Path, price: float | None) -> list[Path]:
    """Write the report and its pictures into the directory ``output``, and return the paths of the Markdown
    and the HTML page. ``price`` is the price of a device-hour. If it is None, the report states the cost in
    device-hours."""
    refuse_unwritable(output, "--output")
    output.mkdir(parents=True, exist_ok=True)
    sections = [
        _summary(run, price),
        _curves(run, output),
        *_evaluations(run),
        *_samples(run.directory / SAMPLES_FILE),
        _speed(run),
        _data(run),
        *_checkpoints(run.directory),
        _configuration(run.cfg),
    ]
    title = f"Run {run.directory.resolve().name}"
    pages = {"report.md": markdown(title, sections), "report.html": as_html(title, sections)}
    for name, page in pages.items():
        with atomic_write(output / name, "w") as file:
            file.write(page)
    return [output / name for name in pages]


def _summary(run: RunFiles, price: float | None) -> Section:
    last, record, cfg = run.of_kind("train")[-1], read_run(run.directory), run.cfg
    device_hours = run.seconds / 3600 * cfg.plan.world_size
    cost = "" if price is None else f", {device_hours * price:,.2f} at {price:g} each"
    rows = [
        ("steps", f"{last['step']:,} of {cfg.Engine.max_steps:,}"),
        ("training loss", f"{number(last, 'loss'):.4f}"),
        *_last_evaluation(run),
        ("time", f"{timedelta(seconds=round(run.seconds))} of steps and evaluations"),
        ("devices", f"{cfg.plan.world_size} ({cfg.plan})"),
        ("cost", f"{device_hours:,.2f} device-hours{cost}"),
        ("loss spikes", f"{len(run.of_kind('spike'))}"),
    ]
    identity = [] if record is None else [("identity", record.run)]
    return Section("Summary", table=[("", ""), *identity, *rows])


def _last_evaluation(run: RunFiles) -> Iterator[tuple[str, str]]:
    for name, (_, losses) in series_of(run.of_kind("eval"), "loss").items():
        yield name.replace("eval", "evaluation loss", 1), f"{losses[-1]:.4f}"


def _curves(run: RunFiles, output: Path) -> Section:
    pictures = [output / "loss.svg", output / "training.svg"]
    save_figure(draw_losses(run.records), pictures[0], "--output")
    wanted = {"lr": "learning rate", "grad_norm": "gradient norm", "ips_total": "tokens a second"}
    figure, places = import_pyplot().subplots(1, len(wanted), figsize=(11, 3))
    for (key, label), axes in zip(wanted.items(), places, strict=True):
        axes.plot(*series_of(run.records, key)["train"], linewidth=0.8)
        axes.set(xlabel="optimizer step", title=label)
        axes.grid(alpha=0.3)
    save_figure(figure, pictures[1], "--output")
    return Section("Curves", pictures=pictures)


def _evaluations(run: RunFiles) -> list[Section]:
    """Make a section for each evaluation set. Its table has a row for each of the latest evaluations, with
    loss, perplexity, bits per byte and metrics, as far as they are known."""
    sections = []
    for name, cfg in data_sets(run.cfg).items():
        records = [record for record in run.of_kind("eval") if record.get("set") == name][-_MOST_EVALUATIONS:]
        if not records:
            continue
        factor, note = 0.0, ""
        if "ppl" in records[0]:
            try:
                factor = tokens_per_byte(cfg, run.tokenizer) / math.log(2)
            except UserError as error:
                note = f"No bits per byte: {error}."
        columns = {"loss": lambda one: f"{number(one, 'loss'):.4f}"}
        if "ppl" in records[0]:
            columns["perplexity"] = lambda one: f"{number(one, 'ppl'):,.2f}"
        if factor:
            columns["bits per byte"] = lambda one, factor=factor: f"{factor * number(one, 'loss'):.4f}"
        for metric in records[0].get("metrics", {}):
            columns[metric] = lambda one, metric=metric: f"{number(one['metrics'], metric):.4f}"
        rows = [[f"{one['step']:,}", *(text(one) for text in columns.values())] for one in records]
        title = "Evaluation" if name is None else f"Evaluation of {name}"
        sections.append(Section(title, table=[["step", *columns], *rows], note=note))
    return sections


def tokens_per_byte(cfg: RunConfig, tokenizer: Tokenizer) -> float:
    """Return the number of predicted tokens per byte of text in ``Data.Eval``."""
    tokens = num_bytes = 0
    for step in build_dataloader(cfg, "Eval"):
        for batch in step:
            for labels, mask in zip(batch["labels"], batch["loss_mask"], strict=True):
                predicted = labels[mask > 0]
                tokens += len(predicted)
                # Special tokens are predicted, but they are not text.
                num_bytes += len(tokenizer.decode(predicted, skip_special_tokens=True).encode())
    return tokens / max(1, num_bytes)


def _samples(path: Path) -> list[Section]:
    """Return a list with one section: the samples that ``ppfleetx generate --output`` wrote to ``path``. The
    list is empty if the file does not exist."""
    if not path.is_file():
        return []
    texts = []
    for number_of_line, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            sample = json.loads(line)
            texts += [f"{sample['prompt']}{one['text']}" for one in sample["generations"]]
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(
                f"{path}:{number_of_line} is not a line of `ppfleetx generate --output`"
            ) from error
    return [Section("Samples", texts=texts)]


def _speed(run: RunFiles) -> Section:
    """Make a section with the run's speed, as medians over all records of training."""
    records = run.of_kind("train")

    def median(key: str) -> float:
        return statistics.median(record[key] for record in records)

    rows = [
        ("seconds a step", f"{median('batch_cost'):.4f}"),
        ("of these waiting for data", f"{median('reader_cost') / median('batch_cost'):.1%}"),
        ("tokens a second", f"{median('ips_total'):,.0f}"),
    ]
    formats = {
        "tflops_per_device": ("TFLOP/s per device", "{:.4g}"),
        "mfu": ("MFU", "{:.1%}"),
        "hfu": ("HFU, with recomputation", "{:.1%}"),
    }
    for key, (name, form) in formats.items():
        if all(key in record for record in records):
            rows.append((name, form.format(median(key))))
    return Section("Speed", table=[("", "median"), *rows])


def _data(run: RunFiles) -> Section:
    last, train = run.of_kind("train")[-1], run.cfg.Data.Train.dataset
    rows = [
        ("data set", train.name),
        *(("from", entry) for entry in train.inputs),
        ("tokens of a sequence", f"{train.max_seq_len:,}"),
        ("sequences trained on", f"{last['consumed_samples']:,}"),
        ("tokens trained on", f"{last['consumed_samples'] * train.max_seq_len:,} at most"),
        ("complete passes", f"{last['epoch']}"),
    ]
    sources = last.get("sources", {})
    rows += [(f"last loss on {name}", f"{number(one, 'loss'):.4f}") for name, one in sources.items()]
    return Section("Data", table=[("", ""), *rows])


def _checkpoints(directory: Path) -> list[Section]:
    rows = []
    for path in complete_checkpoints(directory):
        facts = summary(open_named(path))
        size = bytes_text(facts["model_bytes"] + facts["optimizer_bytes"])
        rows.append((path.name, f"{facts['step']:,}", facts["saved_at"] or "", size))
    return [Section("Checkpoints", table=[("directory", "step", "saved", "size"), *rows])] if rows else []


def _configuration(cfg: RunConfig) -> Section:
    *lines, _ = check_report(cfg).splitlines()  # without the last line, "The configuration is valid."
    return Section("Model, plan and predicted memory", texts=["\n".join(lines)])


# ---- the page


def markdown(title: str, sections: Sequence[Section]) -> str:
    """Format the report as Markdown. Pictures are included as links to their files."""
    parts = [f"# {title}"]
    for section in sections:
        parts.append(f"## {section.title}")
        parts += [f"![{path.stem}]({path.name})" for path in section.pictures]
        if section.table:
            head, *rows = [[cell.replace("|", r"\|") for cell in row] for row in section.table]
            lines = [head, ["---"] * len(head), *rows]
            parts.append("\n".join(f"| {' | '.join(row)} |" for row in lines))
        for text in section.texts:
            longest = max(map(len, re.findall("`+", text)), default=0)
            fence = "`" * max(3, longest + 1)
            parts.append(f"{fence}text\n{text}\n{fence}")
        parts += [section.note] if section.note else []
    return "\n\n".join(parts) + "\n"


def as_html(title: str, sections: Sequence[Section]) -> str:
    """Format the report as one HTML page that contains the pictures."""
    parts = [f"<h1>{html.escape(title)}</h1>"]
    for section in sections:
        parts.append(f"<h2>{html.escape(section.title)}</h2>")
        parts += [_inline(path) for path in section.pictures]
        if section.table:
            cells = ["th", *["td"] * (len(section.table) - 1)]
            rows = [
                "".join(f"<{kind}>{html.escape(cell)}</{kind}>" for cell in row)
                for kind, row in zip(cells, section.table, strict=True)
            ]
            parts.append(f"<table>{''.join(f'<tr>{row}</tr>' for row in rows)}</table>")
        parts += [f"<pre>{html.escape(text)}</pre>" for text in section.texts]
        parts += [f"<p>{html.escape(section.note)}</p>"] if section.note else []
    body = "\n".join(parts)
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title>'
        f"<style>{_STYLE}</style></head>\n<body>{body}</body></html>\n"
    )


def _inline(path: Path) -> str:
    text = path.read_text(encoding="utf-8")
    return text[text.index("<svg") :]
