"""A run deletes and replaces its own checkpoints alone; what it was started from stays in any case."""

import json
import shutil

import pytest

from ppfleetx.checkpoint.manifest import marker_of
from ppfleetx.checkpoint.output_dir import write_best
from ppfleetx.checkpoint.reader import open_checkpoint
from ppfleetx.checkpoint.reshard import merge, reshard
from ppfleetx.checkpoint.resolve_checkpoint import newest_good
from ppfleetx.checkpoint.run_ownership import Ownership, RunRecord, new_run, read_run, run_of, write_run
from ppfleetx.config.errors import CheckpointError
from ppfleetx.config.parallel_plan import ParallelPlan
from tests.checkpoint.checkpoints import RANK, save

ONE, OTHER = "1" * 32, "2" * 32


def names(output_dir):
    return sorted(path.name.removeprefix("epoch_0_") for path in output_dir.glob("epoch_*"))


def test_a_run_keeps_the_newest_of_its_own(tmp_path):
    for step, run in ((1, ONE), (2, ONE), (3, None)):
        save(tmp_path, step=step, run=run, keep_max=2)
    for step in (4, 5):
        save(tmp_path, step=step, run=OTHER, keep_max=1)
    assert names(tmp_path) == ["step_1", "step_2", "step_3", "step_5"]
    assert [run_of(tmp_path / f"epoch_0_step_{step}") for step in (2, 3, 5)] == [ONE, None, OTHER]
    write_best(tmp_path / "epoch_0_step_5", Ownership(OTHER, keep_max=1))
    save(tmp_path, step=6, run=OTHER, keep_max=1)
    save(tmp_path, step=7, run=ONE, keep_max=1)
    assert names(tmp_path) == ["step_3", "step_5", "step_6", "step_7"]


def test_what_a_run_is_started_from_stays(tmp_path):
    """Named through a link, by the run that made it."""
    source = save(tmp_path / "real", step=1, run=ONE)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    spared = frozenset([source.resolve()])
    for step in (2, 3):
        save(tmp_path / "link", step=step, run=ONE, keep_max=1, spared=spared)
    assert names(tmp_path / "real") == ["step_1", "step_3"]
    before = (source / "manifest.json").read_bytes()
    with pytest.raises(CheckpointError, match="was started from it"):
        save(tmp_path / "real", step=1, run=ONE, spared=spared)
    assert (source / "manifest.json").read_bytes() == before
    open_checkpoint(source).verify()


def no_checkpoint(path):
    shutil.rmtree(path)
    path.mkdir()
    (path / "notes").write_text("mine")


def with_notes(path):
    (path / RANK / "notes.txt").write_text("mine")


def a_renamed_one(path):
    shutil.rmtree(path)
    save(path.parent, step=9, run=ONE).rename(path)


def a_link(path):
    path.rename(path.with_name("elsewhere"))
    path.symlink_to(path.with_name("elsewhere"))


@pytest.mark.parametrize(
    ("run", "change"),
    [
        (OTHER, None),
        (None, None),
        (ONE, no_checkpoint),
        (ONE, a_link),
        (ONE, with_notes),
        (ONE, a_renamed_one),
    ],
    ids=["another run's", "nobody's", "no checkpoint", "a link", "with notes", "a renamed one"],
)
def test_nothing_of_others_is_replaced(tmp_path, run, change):
    target = save(tmp_path, step=1, run=run)
    if change is not None:
        change(target)
    before = {path: path.read_bytes() for path in target.rglob("*") if path.is_file()}
    with pytest.raises(
        CheckpointError, match=r"step_1 exists already\. It is not replaced, because this run did not save it"
    ):
        save(tmp_path, step=1, run=ONE)
    assert {path: path.read_bytes() for path in target.rglob("*") if path.is_file()} == before
    assert not list(tmp_path.glob(".saving-*"))
    assert save(tmp_path, step=2, run=ONE).is_dir()


def test_a_checkpoint_that_holds_more_than_was_saved_is_not_deleted(tmp_path):
    noted, link = (save(tmp_path, step=step, run=ONE) for step in (1, 2))
    with_notes(noted)
    (link / "elsewhere").symlink_to(tmp_path / "nowhere")
    for step in (3, 4):
        save(tmp_path, step=step, run=ONE, keep_max=1)
    assert names(tmp_path) == ["step_1", "step_2", "step_4"]
    assert (noted / RANK / "notes.txt").read_text() == "mine"


def test_a_damaged_checkpoint_makes_way_and_is_kept(tmp_path, caplog):
    """Nobody can tell whose it is."""
    for number in range(2):
        target = save(tmp_path, step=1, run=ONE)
        (target / "manifest.json").write_bytes(b"{" + bytes([number]))
    save(tmp_path, step=1, run=ONE)
    assert "renamed to" in caplog.text
    open_checkpoint(target).verify()
    damaged = [tmp_path / f"epoch_0_step_1.damaged{number}" for number in ("", "1")]
    assert [(path / "manifest.json").read_bytes()[1] for path in damaged] == [0, 1]
    (target / RANK / "model.safetensors").write_bytes(b"")  # whose it is can be told: it is replaced
    save(tmp_path, step=1, run=ONE)
    assert names(tmp_path) == ["step_1", "step_1.damaged", "step_1.damaged1"]


def test_checkpoints_of_older_versions_belong_to_nobody(tmp_path):
    path = save(tmp_path, step=1, run=ONE)
    document = json.loads((path / "manifest.json").read_bytes())
    assert document.pop("run") == ONE
    manifest = json.dumps(document).encode()
    (path / "manifest.json").write_bytes(manifest)
    (path / "COMPLETE").write_bytes(marker_of(manifest, 1))
    open_checkpoint(path).verify()
    assert run_of(path) is None


def test_copies_belong_to_nobody(tmp_path):
    path = save(tmp_path / "run", step=1, run=ONE)
    assert run_of(merge(path, tmp_path / "merged")) is None
    assert run_of(reshard(path, tmp_path / "cut", ParallelPlan())) is None


def test_the_record_of_a_directory(tmp_path):
    assert read_run(tmp_path) is None
    for record in (RunRecord(new_run()), RunRecord(ONE, "epoch_0_step_3")):
        write_run(tmp_path, record)
        assert read_run(tmp_path) == record
    for step, run in ((3, None), (4, OTHER), (1, ONE)):
        save(tmp_path, step=step, run=run)
    found = [record.includes(open_checkpoint(path)) for path in sorted(tmp_path.glob("epoch_*"))]
    assert found == [True, True, False]
    shutil.rmtree(tmp_path / "epoch_0_step_1")
    assert newest_good(tmp_path, is_eligible=record.includes).step == 3
    content = (tmp_path / "run_id").read_bytes()
    (tmp_path / "run_id").write_bytes(content.replace(b"1", b"3", 1))
    assert read_run(tmp_path) is None


def test_unfinished_pointers_go_at_the_next_save(tmp_path):
    save(tmp_path, step=1)
    left = [tmp_path / name for name in (".latest.ab12_xyz.tmp", ".best.ab12_xyz.tmp")]
    mine = [tmp_path / name for name in (".latest.tmp", ".notes.ab12_xyz.tmp", ".latest.ab12_xyz.old.tmp")]
    for path in (*left, *mine):
        path.write_text("")
    save(tmp_path, step=2)
    assert [path.exists() for path in (*left, *mine)] == [False] * 2 + [True] * 3
