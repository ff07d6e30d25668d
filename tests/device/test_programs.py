"""The other programs on a device, as short real runs: finetuning, evaluation, a server, the doctor."""

import json
import sys

import pytest

from ppfleetx.config.parallel_plan import ParallelPlan as Plan
from tests.deploy.server.conftest import Server, make_served_checkpoint
from tests.device.place import place
from tests.e2e import finetuning
from tests.e2e.finetuning import GLUE, losses, settings
from tests.helpers import programs
from tests.parity.comparison import apart

pytestmark = pytest.mark.device

PLANS = [Plan(), *([Plan(mp=2)] if place().cards > 1 else [])]
SHORT = {"Engine__num_train_epochs": 1, "Engine__max_steps": 6, "Engine__eval_freq": 3}
# Relative, of losses and gradient norms: float32 sums in another order, over six steps.
TOLERANCE = 1e-3


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return finetuning.write_files(tmp_path_factory.mktemp("SST-2"))


@pytest.fixture
def both(pools, device, files, tmp_path):
    """``both(plan)``: one run on the device and one on the CPU; directories and records of each."""

    def run(plan):
        found = []
        for where, on in ((device, plan), ("cpu", Plan())):
            output = tmp_path / where
            values = settings(files, output, **SHORT) | {"Global.device": where}
            found.append((output, finetuning.run(pools, on, values, GLUE)))
        return found

    return run


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_finetuning_and_its_evaluation(both, pools, device, files, record_property, plan):
    """To classes; then the evaluation program on the checkpoint."""
    (output, found), (other, expected) = both(plan)
    worst = apart(losses(found), losses(expected))
    record_property("losses", worst)
    assert worst <= TOLERANCE
    measured = [
        pools(1).run(
            "tests.e2e.finetuning:evaluate",
            timeout=120.0,
            values=settings(files, output, Engine__save_load__ckpt_dir=run) | {"Global.device": where},
            world=1,
        )[0]
        for where, run in ((device, output), ("cpu", other))
    ]
    assert measured[0]["loss"] == pytest.approx(measured[1]["loss"], rel=TOLERANCE)


def test_a_server_answers_as_on_the_cpu(device, tmp_path):
    checkpoint, answers = make_served_checkpoint(tmp_path), []
    for where in (device, "cpu"):
        server = Server(checkpoint, tmp_path / f"{where}.log", f"Global.device={where}", executed=True)
        prompts = ["the cat", "and the other hat", "hat the hat " * 4]
        sampled = {"temperature": 0.8, "top_p": 0.9, "seed": 3}
        bodies = [{"temperature": 0}, sampled, {**sampled, "repetition_penalty": 1.3}]
        got = [server.complete(prompt=prompts, max_tokens=24, **body).json() for body in bodies]
        answers.append([[choice["text"] for choice in one["choices"]] for one in got])
        assert server.stop() == 0, server.log
        assert "Traceback" not in server.log
    assert answers[0] == answers[1]


@pytest.mark.parametrize("together", [False, True], ids=["one process", "a process for each card"])
def test_the_doctor_finds_nothing_wrong(here, need_cards, tmp_path, record_property, together):
    if together:
        need_cards(2)
    command = [sys.executable, "-m", "ppfleetx", "doctor", "--json"]
    command += ["--nproc", str(here.cards)] if together else []
    done = programs.run(command, timeout=900, executed=True, cwd=tmp_path)
    assert "{" in done.stdout, done.stderr
    found = json.loads(done.stdout[done.stdout.index("{") :])
    rows = found["rows"]
    record_property("rows", rows)
    assert {"group", "name", "status", "found", "cure"} <= set(rows[0])
    failed = [f"{row['name']}: {row['found']}; {row['cure']}" for row in rows if row["status"] == "fail"]
    assert (done.returncode, failed) == (0, []), done.stderr
