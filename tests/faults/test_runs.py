"""The ranks of a job agree on whose the output directory is."""

from ppfleetx.checkpoint.ownership import read_run, run_of
from ppfleetx.config.plan import ParallelPlan as Plan
from tests.faults.program import Program

TWO = Plan(mp=2)


def content(directory):
    files = (path for path in directory.rglob("*") if path.is_file() and not path.name.endswith("lock"))
    return {path: path.read_bytes() for path in files}


def outcomes(program):
    """What the ranks end with, without the kind of the error."""
    ended = program.call()
    return {None if outcome.error is None else outcome.error.partition(": ")[2] for outcome in ended}


def test_all_ranks_are_refused_or_go_on_together(pools, corpus, tmp_path):
    assert outcomes(Program(pools, corpus, tmp_path, TWO, keep_max=2)) == {None}
    before, run = content(tmp_path), read_run(tmp_path).run
    (refusal,) = outcomes(Program(pools, corpus, tmp_path, TWO))
    assert "already holds a run" in refusal
    assert content(tmp_path) == before

    step_3 = tmp_path / "epoch_0_step_3"
    more = {"overwrite": True, "init_from": step_3, "async_save": True, "keep_max": 1, "save_steps": 2}
    (refusal,) = outcomes(Program(pools, corpus, tmp_path, TWO, **more))
    assert "holds epoch_0_step_3, and this run would save under the same name" in refusal
    assert content(tmp_path) == before

    moved = step_3.rename(tmp_path / "elsewhere")
    program = Program(pools, corpus, tmp_path, TWO, **{**more, "init_from": moved})
    assert outcomes(program) == {None}
    assert program.steps() == [4]
    assert run_of(moved) == run != run_of(tmp_path / "epoch_0_step_4") == read_run(tmp_path).run
