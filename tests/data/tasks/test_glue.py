"""GLUE's files, labels, metrics and submissions."""

import numpy as np
import pytest

from ppfleetx.config.errors import DataError
from ppfleetx.config.sections.data import GLUE_OUTPUTS
from ppfleetx.data.tasks import glue as metrics
from ppfleetx.data.tasks.glue import TASKS, read_glue

_PARSES = "sentence1_binary_parse\tsentence2_binary_parse\tsentence1_parse\tsentence2_parse"
MNLI = f"index\tpromptID\tpairID\tgenre\t{_PARSES}\tsentence1\tsentence2"
MNLI_ROW = "0\t" * 8 + "a\tb"
STSB = "index\tgenre\tfilename\tyear\told_index\tsource1\tsource2\tsentence1\tsentence2"
MRPC = "#1 ID\t#2 ID\t#1 String\t#2 String"
QQP = "id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate"
# Task, part, the file as GLUE has it, texts and labels of its examples.
FILES = [
    ("CoLA", "train", 'gj04\t1\t\tIt "works.\nbc01\t0\t*\tWorks it.',
     [('It "works.',), ("Works it.",)], [1, 0]),
    ("CoLA", "test", "index\tsentence\n0\tBill coughed.", [("Bill coughed.",)], None),
    ("CoLA", "test", "clc95\t1\t\tIt works.", [("It works.",)], [1]),
    ("SST2", "train", "sentence\tlabel\na gem \t1\r\n' dull ' \t0\r\n",
     [("a gem ",), ("' dull ' ",)], [1, 0]),
    ("SST2", "test", "index\tsentence\n0\tfine", [("fine",)], None),
    ("MRPC", "dev", f"\ufeffQuality\t{MRPC}\n1\t7\t8\tHe said\tSaid he", [("He said", "Said he")], [1]),
    ("MRPC", "test", f"Quality\t{MRPC}\n0\t1\t2\tx\ty", [("x", "y")], [0]),
    ("MRPC", "test", f"index\t{MRPC}\n0\t1\t2\tx\ty", [("x", "y")], None),
    ("QQP", "train", f"{QQP}\n1\t2\t3\tWhy?\tWhat?\t0\nbroken\trow", [("Why?", "What?")], [0]),
    ("QQP", "test", "id\tquestion1\tquestion2\n0\ta\tb", [("a", "b")], None),
    ("STSB", "dev", f"{STSB}\tscore\n0\tg\tf\t2012\t1\ts\ts\tA dog\tA cat\t3.800",
     [("A dog", "A cat")], [3.8]),
    ("MNLI", "train", f"{MNLI}\tlabel1\tgold_label\n{MNLI_ROW}\tneutral\tneutral", [("a", "b")], [2]),
    ("MNLI", "dev_matched", f"{MNLI}\tlabel1\tlabel2\tgold_label\n{MNLI_ROW}\tneutral\tneutral\tentailment",
     [("a", "b")], [1]),
    ("MNLI", "test_mismatched", f"{MNLI}\n{MNLI_ROW}", [("a", "b")], None),
    ("QNLI", "dev", "index\tquestion\tsentence\tlabel\n0\tWho?\tHe\u2028.\tnot_entailment",
     [("Who?", "He\u2028.")], [1]),
    ("RTE", "train", "index\tsentence1\tsentence2\tlabel\n0\ta\tb\tentailment", [("a", "b")], [0]),
    ("WNLI", "dev", "index\tsentence1\tsentence2\tlabel\n0\ta\tb\t1\n", [("a", "b")], [1]),
]  # fmt: skip


@pytest.mark.parametrize(("task", "part", "content", "texts", "labels"), FILES)
def test_official_files(tmp_path, task, part, content, texts, labels):
    (tmp_path / f"{part}.tsv").write_bytes(content.encode())
    found = read_glue(TASKS[task], tmp_path, part, with_labels=labels is not None)
    assert (found.texts, found.labels) == (texts, labels)


@pytest.mark.parametrize(
    ("task", "part", "name"),
    [(task.name, part, name) for task in TASKS.values() for part, name in task.original_files.items()],
)
def test_the_files_that_glue_was_made_of_are_read_too(tmp_path, task, part, name):
    content = "Quality\t#1 ID\t#2 ID\t#1 String\t#2 String\n1\t1\t2\tx\ty"
    if task == "CoLA":
        content = "clc95\t1\t\tIt works."
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text(content)
    assert read_glue(TASKS[task], tmp_path, part).labels == [1]


@pytest.mark.parametrize("task", TASKS)
def test_whether_a_file_has_labels_is_said_by_the_file(tmp_path, task):
    header = "\t".join(("index", *TASKS[task].texts))
    (tmp_path / f"{'test_matched' if task == 'MNLI' else 'test'}.tsv").write_text(f"{header}\n0\ta\tb")
    part = "test_matched" if task == "MNLI" else "test"
    with pytest.raises(DataError, match=rf"{part}\.tsv:1: .*no {TASKS[task].label}.* put it in Data\.Test"):
        read_glue(TASKS[task], tmp_path, part)


@pytest.mark.parametrize(
    ("task", "content", "words"),
    [
        ("SST2", None, r"there is no file .*dev\.tsv; SST-2 is read"),
        ("SST2", "sentence\tlabel\na\t1\nb\n", r"dev\.tsv:3: 1 field instead of 2"),
        ("SST2", "sentence\tlabel\na\tgood\n", r"dev\.tsv:2: unknown label 'good'; SST-2 has 0, 1"),
        ("RTE", "sentence\tlabel\na\t1\n", r"dev\.tsv:1: the header of RTE must name sentence1, "),
        ("STSB", f"{STSB}\tscore\n" + "0\t" * 9 + "5.5", r"dev\.tsv:2: the score '5\.5' is not a number"),
        ("SST2", "sentence\tlabel\n", r"holds no example"),
        ("CoLA", "", r"holds no example"),
        ("SST2", b"sentence\tlabel\n\xff\t1", r"dev\.tsv:2: this is not UTF-8 text"),
    ],
)
def test_mistakes_are_named_with_file_and_line(tmp_path, task, content, words):
    if content is not None:
        (tmp_path / "dev.tsv").write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(DataError, match=words):
        read_glue(TASKS[task], tmp_path, "dev")


def test_no_row_of_a_test_file_is_left_out(tmp_path):
    """Answers are numbered by its lines."""
    (tmp_path / "test.tsv").write_text("id\tquestion1\tquestion2\n0\ta\n1\ta\tb\n")
    with pytest.raises(DataError, match=r"test\.tsv:2: 2 fields"):
        read_glue(TASKS["QQP"], tmp_path, "test", with_labels=False)


def test_the_configuration_knows_the_same_tasks():
    assert {name: len(task.labels) or 1 for name, task in TASKS.items()} == GLUE_OUTPUTS


def test_submissions():
    assert TASKS["MNLI"].file_name("test_mismatched") == "MNLI-mm.tsv"
    assert TASKS["MNLI"].file_name("dev_matched") == "MNLI-m.dev.tsv"
    assert TASKS["STSB"].file_name("test") == "STS-B.tsv"
    assert TASKS["STSB"].answer([5.25]) == "5.000"
    assert TASKS["RTE"].answer([0.1, 0.2]) == "not_entailment"


def outputs(*classes):
    return np.eye(2)[list(classes)]


def test_metrics_by_hand():
    """3 true positives, 1 false positive, 2 false negatives, 4 true negatives."""
    predicted = outputs(1, 1, 1, 1, 0, 0, 0, 0, 0, 0)
    truth = [1, 1, 1, 0, 1, 1, 0, 0, 0, 0]
    assert metrics.glue_metrics("SST2", predicted, truth) == {"accuracy": 0.7}
    both = metrics.glue_metrics("MRPC", predicted, truth)
    assert both == pytest.approx({"accuracy": 0.7, "f1": 6 / 9})
    matthews = (3 * 4 - 1 * 2) / np.sqrt(4 * 5 * 5 * 6)
    assert metrics.glue_metrics("CoLA", predicted, truth)["mcc"] == pytest.approx(matthews)


def test_correlations_by_hand():
    found = metrics.glue_metrics("STSB", np.array([[1.0], [2.0], [4.0]]), [1.0, 3.0, 2.0])
    assert found["pearson"] == pytest.approx(1 / np.sqrt(14 / 3 * 2))  # of centred values
    assert found["spearman"] == pytest.approx(0.5)
    constant = metrics.glue_metrics("STSB", np.ones((3, 1)), [1.0, 3.0, 2.0])
    assert constant == {"pearson": 0.0, "spearman": 0.0}


def test_a_missing_library_is_named(monkeypatch):
    find = metrics.importlib.util.find_spec
    monkeypatch.setattr(metrics.importlib.util, "find_spec", lambda n: None if n == "sklearn" else find(n))
    with pytest.raises(DataError, match=r"need sklearn, .* pip install 'ppfleetx\[glue\]'"):
        metrics.require_libraries()
