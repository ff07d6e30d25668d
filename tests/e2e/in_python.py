"""In the ranks of a pool: training as a Python program asks for it, several times."""

from __future__ import annotations


def runs(corpus: str, output: str, plans: list[list[str]]) -> None:
    """One run after the other in this process, each from the configuration on."""
    from ppfleetx.commands.start_process import start_process
    from ppfleetx.commands.training import train
    from tests.e2e.program import NANO

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
        cfg, ctx = start_process(str(NANO), given, reads=("Train",))
        train(cfg, ctx)
