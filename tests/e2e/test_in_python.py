"""Training from a Python program of the user's own, instead of by the tools."""

import subprocess
import sys

import pytest

from tests.e2e.conftest import LLAMA_NANO, NANO, ROOT, environment, losses

PROGRAM = """
import sys
corpus, output, late, *configs = sys.argv[1:]
if late == "late":
    import paddle
    column = paddle.arange(6, dtype="float32").reshape([2, 3]).t()  # a view with strides
    import signal
    signal.signal(signal.SIGTERM, lambda *_: None)
    handler = signal.getsignal(signal.SIGTERM)
from ppfleetx.commands.initialize import initialize

for number, config in enumerate(configs):
    overrides = [
        f"Data.Train.dataset.input_dir={corpus}",
        f"Engine.save_load.output_dir={output}/{number}",
        "Engine.max_steps=3", "Engine.eval_freq=0", "Data.Eval=null",
        "Global.flags={FLAGS_benchmark: true}" if number == 0 else "Global.seed=1024",
    ]
    cfg, ctx = initialize(config, overrides, reads=("Train",))
    from ppfleetx.commands.train import train  # which imports Paddle
    train(cfg, ctx)
    import paddle
    assert paddle.get_flags("FLAGS_benchmark")["FLAGS_benchmark"] == (number == 0)
if late == "late":
    assert (column @ column.t()).tolist() == [[9, 12, 15], [12, 17, 22], [15, 22, 29]]
    assert signal.getsignal(signal.SIGTERM) is handler
"""


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("late", ["first", "late"])
def test_several_runs_in_one_process(corpus, tmp_path, late):
    """With the same and with another model; after Paddle was imported and used, with one warning."""
    configs = [NANO, NANO, LLAMA_NANO]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(corpus), str(tmp_path), late, *map(str, configs)],
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    first, again, other = (losses(tmp_path / str(number)) for number in range(3))
    assert first == again and len(first) == 3
    assert len(other) == 3 and other != first
    warned = [line for line in done.stdout.splitlines() if "CPU settings come too late" in line]
    assert len(warned) == (late == "late")
    said = [line for line in done.stdout.splitlines() if "] - CPU settings: " in line]
    assert len({line.partition("] - ")[2] for line in said}) == 1
    assert ("FLAGS_use_stride_kernel=0" in said[0]) == (late == "first")


def test_several_runs_in_each_rank_of_a_job(pools, corpus, tmp_path):
    """The same plan twice, then another: fleet is started anew each time."""
    plans = [["Distributed.mp_degree=2"], ["Distributed.mp_degree=2"], ["Distributed.pp_degree=2"]]
    arguments = {"corpus": str(corpus), "output": str(tmp_path), "plans": plans}
    pools(2).run("tests.e2e.test_in_python:runs", timeout=120.0, **arguments)
    first, again, other = (losses(tmp_path / str(number)) for number in range(3))
    assert first == again and [step for step, *_ in first] == [1, 2]
    assert [loss for _, loss, _ in other] == pytest.approx([loss for _, loss, _ in first], rel=0.02)


def runs(corpus: str, output: str, plans: list[list[str]]) -> None:
    """In a rank: one run after the other, each from its configuration."""
    from ppfleetx.commands.initialize import initialize
    from ppfleetx.commands.train import train

    for number, overrides in enumerate(plans):
        given = [
            f"Data.Train.dataset.input_dir={corpus}",
            "Data.Eval=null",
            f"Engine.save_load.output_dir={output}/{number}",
            "Engine.max_steps=2",
            "Engine.eval_freq=0",
            "Global.global_batch_size=4",
            "Global.local_batch_size=null",
            *overrides,
        ]
        cfg, ctx = initialize(str(NANO), given, reads=("Train",))
        train(cfg, ctx)
