"""The part of the start-up block that the engine adds."""

from ppfleetx.config.plan import ParallelPlan as Plan
from ppfleetx.core.engine.callbacks.device_usage import offload_notes
from ppfleetx.distributed.context import ParallelContext


def test_offload_on_a_cpu_is_said_to_save_nothing():
    plan = Plan(sharding=2, sharding_stage=2, sharding_offload=True)
    (line,) = offload_notes(ParallelContext(plan, device="cpu"))
    assert "saves nothing on a CPU" in line
    assert offload_notes(ParallelContext(plan, device="gpu")) == []
    assert offload_notes(ParallelContext(Plan(sharding=2, sharding_stage=2), device="cpu")) == []
