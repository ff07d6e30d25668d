"""`ppfleetx report`: a page about a run whose directory is made by hand, and the mistakes."""

import json
import math
import re
import shutil
import xml.etree.ElementTree as ET

import numpy as np
import pytest

from ppfleetx.commands.main import call
from ppfleetx.config.errors import ConfigError, DataError
from ppfleetx.config.loader import load_config
from ppfleetx.config.yaml_dump import run_record
from ppfleetx.data.indexed_dataset import IndexedDatasetWriter
from tests.checkpoint.checkpoints import save
from tests.helpers.texts import CORPUS, small_tokenizer

pytest.importorskip("matplotlib")
EVAL_LOSS = 2.5


def train(step, **more):
    speeds = {"batch_cost": 0.5, "reader_cost": 0.05, "ips_total": 512.0, "ips": 256.0}
    about = {"epoch": 0, "lr": 1e-3, "grad_norm": 1.0, "consumed_samples": 8 * step}
    return {"kind": "train", "step": step, "loss": 6.0 - step / 10, **about, **speeds, **more}


def evaluation(step, **more):
    found = {"loss": EVAL_LOSS, "ppl": math.exp(EVAL_LOSS), "tokens": 256, "seconds": 1.0}
    return {"kind": "eval", "step": step, **found, **more}


RECORDS = [train(1), train(2, loss=None), train(4, mfu=0.4), evaluation(4)]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run on two data-parallel processes, with data, tokenizer, a checkpoint and samples."""
    place = tmp_path_factory.mktemp("report")
    tokenizer = small_tokenizer()
    tokenizer.save(place / "tokenizer")
    (place / "data").mkdir()
    with IndexedDatasetWriter(place / "data/toy", np.uint16) as writer:
        for text in CORPUS * 5:
            ids = [*tokenizer.encode(text), tokenizer.eod_id]
            writer.add_document(np.array(ids), [len(ids)])
    run = place / "run"
    overrides = [f"Data.{mode}.dataset.input_dir={place / 'data'}" for mode in ("Train", "Eval")]
    overrides += [f"Data.tokenizer.dir={place / 'tokenizer'}", f"Engine.save_load.output_dir={run}"]
    save(run, step=4, tensors=[])
    cfg = load_config("debug/gpt_nano", overrides, world_size=2)
    (run / "config.yaml").write_text(run_record(cfg))
    write(run, RECORDS)
    sample = {"prompt": "x = ", "generations": [{"text": "```<b>"}]}
    (run / "samples.jsonl").write_text(json.dumps(sample) + "\n")
    return run


def write(run, records):
    (run / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))


@pytest.fixture
def run(finished, tmp_path):
    """A copy to change."""
    return shutil.copytree(finished, tmp_path / "run")


def page_of(run, *words):
    call("report", [str(run), *words])
    return (run / "report/report.md").read_text()


def rows(page):
    """Tables as {first cell: the others}."""
    lines = [line.strip("|").split("|") for line in page.splitlines() if line.startswith("|")]
    return {first.strip(): [cell.strip() for cell in others] for first, *others in lines}


def test_the_page_of_a_run(run):
    page = page_of(run, "--price", "3600")
    found = rows(page)
    assert found["steps"] == ["4 of 8"]
    assert found["evaluation loss"] == ["2.5000"]
    assert found["devices"][0].startswith("2 (dp 2")  # dp_degree is open: two ranks share the tokens
    # 4 steps of half a second and a second of evaluation, on two devices.
    assert found["cost"][0].endswith("6.00 at 3600 each")
    assert found["4"][:2] == ["2.5000", f"{math.exp(EVAL_LOSS):.2f}"]
    assert found["of these waiting for data"] == ["10.0%"]
    assert found["tokens trained on"][0].startswith(f"{4 * 8 * 32:,}")
    assert found["epoch_0_step_4"][0] == "4"
    assert "````text\nx = ```<b>\n````" in page
    assert "about " in page[page.index("predicted memory") :]


def test_bits_per_byte_count_the_text_of_the_evaluated_tokens(run):
    """Tokens stand for at least a byte, those of this vocabulary for a few."""
    page = page_of(run)
    assert "| step | loss | perplexity | bits per byte |" in page
    bits = float(rows(page)["4"][2])
    assert 1 < EVAL_LOSS / math.log(2) / bits < 6


def test_the_html_page_needs_no_other_file(run, tmp_path):
    page_of(run)
    page = (run / "report/report.html").read_text()
    assert page.count("<svg") == 2 and "```&lt;b&gt;" in page
    assert "src=" not in page and "<link" not in page and "<script" not in page
    for picture in ("loss.svg", "training.svg"):
        ET.parse(run / "report" / picture)


def test_named_sets_have_tables_and_missing_data_a_sentence(run):
    write(run, [*RECORDS[:3], *(evaluation(4, set=name) for name in ("wiki", "code"))])
    config = run / "config.yaml"
    config.write_text(config.read_text().replace("sets: {}", "sets: {wiki: nowhere, code: nowhere}"))
    page = page_of(run)
    assert "## Evaluation of wiki" in page and "## Evaluation of code" in page
    assert "No bits per byte: " in page and "nowhere" in page


@pytest.mark.parametrize(
    ("every", "records", "cost"),
    [
        (1, [train(501), train(502), evaluation(502)], "4.00"),  # it went on from another run's step 500
        # It went on from another run's step 497, and was interrupted at step 505 and resumed.
        (10, [train(500, num_steps=3), train(510, num_steps=5)], "13.00"),
    ],
)
def test_steps_of_another_directory_take_no_time_in_this_one(run, every, records, cost):
    config = run / "config.yaml"
    config.write_text(re.sub(r"logging_freq: \d+", f"logging_freq: {every}", config.read_text()))
    write(run, records)
    assert rows(page_of(run, "--price", "3600"))["cost"][0].endswith(f"hours, {cost} at 3600 each")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (shutil.rmtree, "is not the directory of a run"),
        (lambda run: (run / "config.yaml").unlink(), "it has no config.yaml"),
        (lambda run: write(run, RECORDS[3:]), "no training step"),
        (lambda run: (run / "samples.jsonl").write_text("{}\n"), "samples.jsonl:1 is not a line"),
    ],
)
def test_mistakes_name_the_place(run, change, message):
    change(run)
    with pytest.raises(DataError, match=message):
        page_of(run)


def test_the_options_are_checked(run):
    with pytest.raises(ConfigError, match="--price"):
        page_of(run, "--price", "-1")
    (run / "file").write_text("")
    with pytest.raises(ConfigError, match="--output"):
        page_of(run, "--output", str(run / "file"))
