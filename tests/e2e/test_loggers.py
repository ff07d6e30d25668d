"""``Engine.loggers``: every writer has the numbers of ``metrics.jsonl``, after a resume too."""

from __future__ import annotations

import csv
import json
import shutil
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

from ppfleetx.commands.check import check_report
from ppfleetx.config.errors import ConfigError
from ppfleetx.config.ineffective_options import refuse_absent
from ppfleetx.config.loader import load_config
from ppfleetx.config.registries import LOGGERS, LoggerTraits
from ppfleetx.core.engine.callbacks.metrics import build_writers, numbers_of
from ppfleetx.core.loggers.base import LogStart
from tests.docs.blocks import blocks
from tests.e2e.conftest import NANO, ROOT, Tool, records

Curves = dict[str, dict[int, float]]
"""Name -> step -> number."""

ALL = "[jsonl, tensorboard, {name: wandb, options: {project: nano, name: one}}, csv, mlflow]"


def of_jsonl(run: Path) -> Curves:
    found: Curves = {}
    for record in (*records(run, "train"), *records(run, "eval")):
        for name, value in numbers_of(record).items():
            found.setdefault(name, {})[record["step"]] = value
    return found


def of_csv(run: Path) -> Curves:
    found: Curves = {}
    with (run / "metrics.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            for name, text in row.items():
                if name != "step" and text:
                    assert int(row["step"]) not in found.setdefault(name, {}), "each number is there once"
                    found[name][int(row["step"])] = float(text)
    return found


def of_tensorboard(run: Path) -> Curves:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run / "tensorboard")).Reload()
    found: Curves = {}
    for name in events.Tags()["scalars"]:
        points = events.Scalars(name)
        found[name] = {point.step: point.value for point in points}
        assert len(found[name]) == len(points), "later steps of a stopped run are left out"
    return found


def of_mlflow(run: Path) -> Curves:
    (place,) = run.glob("mlruns/*/*/metrics")
    found: Curves = {}
    for path in place.rglob("*"):
        if path.is_file():
            lines = [line.split() for line in path.read_text().splitlines()]
            found[str(path.relative_to(place))] = {int(step): float(value) for _, value, step in lines}
    return found


def of_wandb(directory: Path) -> tuple[str, dict, Curves]:
    """Id, configuration and curves of an offline run."""
    from wandb.proto.wandb_internal_pb2 import Record

    (file,) = directory.glob("*.wandb")
    run_id, config, found = "", {}, {}
    for content in wandb_records(file.read_bytes()):
        record = Record.FromString(content)
        if record.WhichOneof("record_type") == "run":
            run_id = record.run.run_id
            config = {item.key: json.loads(item.value_json) for item in record.run.config.update}
        items = {item.key or "/".join(item.nested_key): item.value_json for item in record.history.item}
        for name, text in items.items():
            if not name.startswith("_"):
                found.setdefault(name, {})[int(items["_step"])] = json.loads(text)
    return run_id, config, found


def wandb_records(data: bytes) -> Iterator[bytes]:
    """The contents of a file of records in blocks of 32 KiB, as LevelDB logs are."""
    assert data[:4] == b":W&B"
    place, content = 7, b""
    while place + 7 <= len(data):
        left = 32768 - place % 32768
        if left < 7:
            place += left
            continue
        length, kind = struct.unpack("<HB", data[place + 4 : place + 7])
        content += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):
            yield content
            content = b""


def single(curves: Curves) -> Curves:
    """Rounded to the 32 bits of TensorBoard's numbers."""
    shorter = struct.Struct("f")
    return {k: {s: shorter.unpack(shorter.pack(v))[0] for s, v in c.items()} for k, c in curves.items()}


def test_all_writers_hold_the_same_numbers(tool: Tool, tmp_path: Path) -> None:
    run = tmp_path / "run"
    keys = [f"Engine.loggers={ALL}", "Engine.max_steps=4", "Engine.eval_freq=2"]
    keys += ["Engine.save_load.save_steps=2", "Global.peak_tflops=0.5"]
    done = tool.ok(run, *keys)
    first = of_jsonl(run)
    assert first["train/loss"].keys() == {1, 2, 3, 4} and first["eval/loss"].keys() == {0, 2, 4}
    assert "wandb: offline; `wandb sync" in done.stdout
    shutil.rmtree(run / "epoch_0_step_4")  # as if it had been killed before it was saved
    tool.ok(run, *keys, "Engine.save_load.resume=auto")

    expected = of_jsonl(run)
    assert expected["train/loss"] == first["train/loss"]
    assert of_csv(run) == expected
    assert of_mlflow(run) == expected
    assert of_tensorboard(run) == single(expected)
    offline = [of_wandb(path) for path in sorted(run.glob("wandb/offline-run-*"))]
    (one, config, before), (two, _, after) = offline
    assert one == two and config["Model"]["hidden_size"] == load_config(NANO).Model.hidden_size
    assert before == first
    assert after == {name: {s: v for s, v in curve.items() if s > 2} for name, curve in expected.items()}


@pytest.mark.parametrize(
    ("loggers", "expected"),
    [
        ("[tensorbord]", r"Engine\.loggers\.0\.name .*one of jsonl, tensorboard"),
        ("[{name: csv, options: {dir: x}}]", "csv has no option dir; it takes none"),
        ("[{name: wandb, options: {projekt: x}}]", "wandb has no option projekt; it takes project, name"),
        ("[{name: tensorboard, options: {dir: 5}}]", r"Engine\.loggers\.0\.options\.dir = 5.*text"),
        ("[csv, csv]", r"Engine\.loggers.*csv is named 2 times"),
    ],
)
def test_writers_that_are_none(loggers: str, expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        load_config(NANO, [f"Engine.loggers={loggers}"])


def test_a_missing_library_is_reported_before_training(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = LOGGERS._entries["tensorboard"]
    gone = type(entry)(entry.target, LoggerTraits("no_such_library", "tensorboard", ("dir",)))
    monkeypatch.setitem(LOGGERS._entries, "tensorboard", gone)
    cfg = load_config(NANO, ["Engine.loggers=[tensorboard]"])
    expected = r"needs `pip install 'ppfleetx\[tensorboard\]'`, which brings no_such_library"
    with pytest.raises(ConfigError, match=rf"Engine\.loggers = 'tensorboard' \(-o override 1\): {expected}"):
        refuse_absent(cfg)
    assert "missing        Engine.loggers: tensorboard needs" in check_report(cfg, "cpu")


def test_metrics_without_their_callback(tool: Tool, tmp_path: Path) -> None:
    keys = ["Engine.max_steps=2", "Engine.eval_freq=0", "Engine.callbacks=[train_log]"]
    tool.ok(tmp_path / "a", *keys)
    assert not (tmp_path / "a/metrics.jsonl").exists()
    tool.ok(tmp_path / "b", *keys, "Engine.loggers=[jsonl]")
    assert len(records(tmp_path / "b", "train")) == 2


def test_the_writer_of_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LOGGERS, "_entries", dict(LOGGERS._entries))
    (page,) = [block for block in blocks(ROOT / "docs/logging.md") if block.title == "latest.py"]
    exec(compile(page.text, "latest.py", "exec"), {})
    cfg = load_config(NANO, ["Engine.loggers=[{name: latest, options: {file: last.json}}]"])
    writer = build_writers(cfg, tmp_path)["latest"]
    writer.start(LogStart(0, {}))
    writer.write(1, {"train/loss": 2.0})
    writer.write(2, {"eval/loss": 3.0})
    writer.finish()
    found = json.loads((tmp_path / "last.json").read_text())
    assert found == {"train/loss": 2.0, "step": 2, "eval/loss": 3.0}
    cfg = load_config(NANO, ["Engine.loggers=[{name: latest, options: {path: last.json}}]"])
    with pytest.raises(ConfigError, match="options of latest: got an unexpected keyword argument 'path'"):
        build_writers(cfg, tmp_path)
