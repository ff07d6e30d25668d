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
