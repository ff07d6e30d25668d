"""Whose an output directory is: who may start there, what that deletes, and what is left alone."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path

import pytest

from ppfleetx.checkpoint.output_dir import delete_checkpoint
from ppfleetx.checkpoint.resolve_checkpoint import open_resolved, resolve_checkpoint
from ppfleetx.checkpoint.run_ownership import RunRecord, read_run, run_of, write_run
from ppfleetx.config.errors import CheckpointError, ConfigError
from ppfleetx.config.loader import load_config
from ppfleetx.config.sections.root import RunConfig
from ppfleetx.config.yaml_dump import run_record
from ppfleetx.core.engine import claim_output_dir as claiming
from ppfleetx.core.engine.check_output_dir import check_start, output_dir_of
from ppfleetx.core.engine.claim_output_dir import claim, lock_output_dir
from ppfleetx.core.engine.restore import Start, base_of, find_start
from ppfleetx.distributed.context import ParallelContext
from tests.checkpoint.checkpoints import save

NANO = Path(__file__).resolve().parents[3] / "ppfleetx/configs/debug/gpt_nano.yaml"
EARLIER, OTHER = "1" * 32, "2" * 32
PROGRESS = {"train": {"step": 0, "consumed_samples": 0, "epoch": 0}}


def config(output_dir: Path, *overrides: str) -> RunConfig:
    keys = (f"Engine.save_load.{override}" if override[0].islower() else override for override in overrides)
    return load_config(NANO, [f"Engine.save_load.output_dir={output_dir}", *keys])


def checkpoint(output_dir: Path, step: int, run: str | None = EARLIER) -> Path:
    state = {"train": {**PROGRESS["train"], "step": step}, "step": step}
    return save(output_dir, step=step, run=run, state=state)


@pytest.fixture
def used(tmp_path: Path) -> Path:
    """Output directory of a run with three checkpoints, and with files that no run wrote."""
    output_dir = tmp_path / "output"
    output_dir.mkdir()
    (output_dir / "config.yaml").write_text(run_record(config(output_dir)))
    write_run(output_dir, RunRecord(EARLIER))
    for step in (10, 20, 30):
        checkpoint(output_dir, step)
    (output_dir / "metrics.jsonl").write_text('{"kind": "train", "step": 30}\n')
    (output_dir / "notes.txt").write_text("mine")
    (output_dir / "epoch_0_step_20_copy").mkdir()
    return output_dir


def content(directory: Path) -> dict[str, bytes]:
    """All files but locks."""
    files = (path for path in directory.rglob("*") if path.is_file() and not path.name.endswith("lock"))
    return {str(path.relative_to(directory)): path.read_bytes() for path in files}


def begin(cfg: RunConfig, *, will_reach=lambda epoch, step: False) -> tuple[Start, str]:
    """What a run of one process does before its first step."""
    with ExitStack() as stack:
        lock_output_dir(cfg, stack)
        start = find_start(cfg.Engine.save_load, output_dir_of(cfg), ParallelContext.single())
        return start, claim(cfg, start, will_reach).run


def steps(output_dir: Path) -> list[int]:
    return sorted(int(path.name.rsplit("_", 1)[1]) for path in output_dir.glob("epoch_0_step_*[0-9]"))


# ---- who may start


@pytest.mark.parametrize("leave", ["checkpoints", "metrics.jsonl", "config.yaml", "run_id"])
def test_a_new_run_is_refused_where_one_has_been(used, leave):
    if leave != "checkpoints":
        for step in (10, 20, 30):
            delete_checkpoint(used / f"epoch_0_step_{step}")
        (used / "latest").unlink()
    for name in ("metrics.jsonl", "config.yaml", "run_id"):
        if name != leave:
            (used / name).unlink()
    before = content(used.parent)
    with pytest.raises(ConfigError) as caught:
        begin(config(used))
    for words in (str(used), "resume=auto", "output_dir=DIR", "overwrite=True"):
        assert words in str(caught.value)
    assert content(used.parent) == before
    assert not (used / ".run.lock").exists()


def test_a_run_inside_a_checkpoint_is_refused(used, tmp_path):
    (tmp_path / "link").symlink_to(used / "epoch_0_step_30")
    before = content(used)
    for place in (used / "epoch_0_step_30", used / "epoch_0_step_30/sub/run", tmp_path / "link/run"):
        for way in ("resume=False", "resume=auto", "overwrite=True"):
            with (
                ExitStack() as stack,
                pytest.raises(ConfigError, match=r"is inside the checkpoint .*_step_30\. "),
            ):
                lock_output_dir(config(place, way), stack)
    assert content(used) == before
    check_start(config(used / "beside"))


def test_a_configuration_of_the_users_own_is_not_a_run(tmp_path):
    (tmp_path / "config.yaml").write_text("Model: {}\n")
    with pytest.raises(ConfigError, match=r"a config\.yaml that no run wrote"):
        begin(config(tmp_path))
    begin(config(tmp_path, "overwrite=True"))
    assert (tmp_path / "config.1.yaml").read_text() == "Model: {}\n"


def test_checkpoints_of_a_run_may_be_resumed_in_its_directory(used, tmp_path):
    link = tmp_path / "link"
    link.symlink_to(used)
    for place in (used, used / "latest", link / "epoch_0_step_10", "epoch_0_step_20/mp_00_sharding_00_pp_00"):
        start, run = begin(config(used, f"ckpt_dir={used / place}"))
        assert (run, start.resumes) == (EARLIER, True)
    stranger = checkpoint(tmp_path / "elsewhere", 10, OTHER)
    for place in (stranger, checkpoint(used, 40, OTHER)):
        with pytest.raises(ConfigError, match="already holds a run"):
            begin(config(used, f"ckpt_dir={place}"))


def test_one_way_to_begin(used, tmp_path):
    both = (f"ckpt_dir={used}", f"init_from={used}")
    with pytest.raises(ConfigError, match="not both"):
        check_start(config(tmp_path / "new", *both))


# ---- which run it is


def test_a_resumed_run_keeps_its_identity(used):
    assert begin(config(used, "resume=auto"))[1] == EARLIER
    assert begin(config(used, "resume=True"))[1] == EARLIER
    for step in (10, 20, 30):
        delete_checkpoint(used / f"epoch_0_step_{step}")
    start, run = begin(config(used, "resume=auto"))  # killed before its first checkpoint
    assert (start.checkpoint, run) == (None, EARLIER)
    assert not (used / "metrics.jsonl").exists()


def test_new_runs_have_identities_of_their_own(tmp_path):
    runs = {begin(config(tmp_path / name, "resume=auto"))[1] for name in "abc"}
    assert len(runs) == 3
    assert read_run(tmp_path / "a").run in runs


def test_metrics_are_kept_where_every_checkpoint_is_damaged(used):
    for path in used.glob("epoch_0_step_*0"):
        (path / "manifest.json").write_text("{")
    start, run = begin(config(used, "resume=auto"))
    assert (start.checkpoint, run) == (None, EARLIER)
    assert (used / "metrics.jsonl").exists()


def test_only_the_runs_own_checkpoints_are_gone_on_from(used):
    checkpoint(used, 40, OTHER)
    checkpoint(used, 50, None)
    with pytest.raises(CheckpointError, match="epoch_0_step_50 is another run's"):
        begin(config(used, "resume=True"))
    for resume in ("auto", "True"):  # the first names the newest of its own again
        start, run = begin(config(used, f"resume={resume}"))
        assert (start.state.step, run) == (30, EARLIER)


@pytest.mark.parametrize("run", [None, OTHER])
def test_a_run_of_an_older_version_or_without_its_record_goes_on(tmp_path, run):
    checkpoint(tmp_path, 10, run)
    checkpoint(tmp_path, 20, run)
    (tmp_path / "config.yaml").write_text("Model: {}\n")
    for _ in range(2):  # the second time as if killed before it had saved
        start, found = begin(config(tmp_path, "resume=auto", "keep_max=1"))
        assert start.state.step == 20
    assert run in (None, found)
    assert read_run(tmp_path) == RunRecord(found, None if run else "epoch_0_step_20")
    checkpoint(tmp_path, 30, found)
    assert begin(config(tmp_path, "resume=auto"))[0].state.step == 30


def test_converted_weights_are_a_beginning_that_is_remembered(tmp_path):
    save(tmp_path, step=0, run=None, state={})
    for _ in range(2):
        start, _ = begin(config(tmp_path, "resume=auto"))
        assert (start.checkpoint.step, start.resumes) == (0, False)


# ---- overwriting


def test_overwriting_deletes_what_the_earlier_run_wrote(used, caplog):
    checkpoint(used, 40, OTHER)
    checkpoint(used, 50, None)
    before = content(used)
    start, run = begin(config(used, "overwrite=True"))
    assert start.checkpoint is None
    assert run not in (EARLIER, OTHER)
    assert steps(used) == [40, 50]
    assert "output: epoch_0_step_40, epoch_0_step_50. " in caplog.text
    left = content(used)
    kept = {name for name in before if name.startswith(("epoch_0_step_40", "epoch_0_step_50", "notes"))}
    assert {name: left[name] for name in kept} == {name: before[name] for name in kept}
    assert set(left) - kept == {"config.yaml", "run_id", "latest"}
    assert (used / "epoch_0_step_20_copy").is_dir()
    assert begin(config(used, "resume=auto"))[0].checkpoint is None
    assert read_run(used).run == run


def lora(place: Path | str) -> str:
    return f"Model.lora.base={place}"


@pytest.mark.parametrize("key", ["init_from", "ckpt_dir", "lora"])
@pytest.mark.parametrize("place", ["", "latest", "best", "epoch_0_step_30", "../link"])
def test_overwriting_spares_what_the_run_is_started_from(used, key, place):
    (used.parent / "link").symlink_to(used / "epoch_0_step_30")
    (used / "best").write_bytes((used / "latest").read_bytes())
    named = lora(used / place) if key == "lora" else f"{key}={used / place}"
    cfg = config(used, "overwrite=True", named)
    base = base_of(cfg)
    _, run = begin(cfg)
    assert steps(used) == [30]
    assert run_of(used / "epoch_0_step_30") == EARLIER != run
    open_resolved(resolve_checkpoint(used / "epoch_0_step_30", verify=True))
    if key == "lora":
        assert base.resolve() == used / "epoch_0_step_30"
        checkpoint(used, 31, run)
        again = config(used, "resume=auto", named)
        if place in ("", "epoch_0_step_30", "../link"):  # the pointers are the new run's now
            assert base_of(again).resolve() == base.resolve()


def test_overwriting_that_was_cut_short_is_done_again(used, monkeypatch):
    def killed_at_the_second(path: Path) -> None:
        if path.name.endswith("_20"):
            raise KeyboardInterrupt
        delete_checkpoint(path)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(claiming, "delete_checkpoint", killed_at_the_second)
        begin(config(used, "overwrite=True"))
    assert begin(config(used, "resume=auto"))[0].state.step == 30
    with pytest.raises(ConfigError, match="2 checkpoints"):
        begin(config(used))
    begin(config(used, "overwrite=True"))
    assert steps(used) == []


def test_names_that_the_run_would_need_are_refused_before_anything_goes(used):
    stranger = checkpoint(used, 40, OTHER)
    (used / "epoch_0_step_44").mkdir()
    before = content(used)
    for overrides in (("overwrite=True",), ("resume=auto",)):
        with pytest.raises(
            ConfigError, match="holds epoch_0_step_40, epoch_0_step_44, and this run would save"
        ):
            begin(config(used, *overrides), will_reach=lambda epoch, step: step > 30)
    assert content(used) == before
    (stranger / "manifest.json").write_text("{")  # damaged ones make way
    (used / "epoch_0_step_44").rmdir()
    begin(config(used, "resume=auto"), will_reach=lambda epoch, step: step > 30)


# ---- what is written


def test_what_the_configuration_says(used):
    begin(config(used, f"ckpt_dir={used / 'epoch_0_step_10'}", "Engine.max_steps=9"))
    again = load_config(used / "config.yaml")
    assert (again.Engine.max_steps, again.Engine.save_load.resume) == (9, "auto")
    assert not list(used.glob("config.*.yaml"))


def test_unfinished_files_of_killed_runs_go(used):
    (used / "tokenizer").mkdir()
    (used / "tokenizer/tokenizer.json").write_text("{}")
    names = ("run_id", "config.yaml", "metrics.jsonl", "tokenizer/tokenizer.json")
    left = [(used / name).with_name(f".{Path(name).name}.ab12_xyz.tmp") for name in names]
    mine = [used / name for name in (".notes.ab12_xyz.tmp", "notes.txt.ab12_xyz.tmp", "tokenizer/.a.tmp")]
    for path in (*left, *mine):
        path.write_text("")
    begin(config(used, "resume=auto"))
    assert [path.exists() for path in (*left, *mine)] == [False] * 4 + [True] * 3


def test_a_kill_between_a_save_and_its_deletions_leaves_none_too_many(used):
    stranger = checkpoint(used, 5, OTHER)
    begin(config(used, "resume=auto", "keep_max=2"))
    assert steps(used) == [5, 20, 30] and stranger.is_dir()


def test_the_newest_is_named_again(used):
    (used / "latest").unlink()
    begin(config(used, "resume=auto"))
    assert resolve_checkpoint(used / "latest") == used / "epoch_0_step_30"
    assert json.loads((used / "metrics.jsonl").read_text())["step"] == 30
