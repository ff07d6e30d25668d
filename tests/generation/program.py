"""The generation program in the ranks of a pool (tests/helpers/ranks.py), under any plan."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Mapping, Sequence
from typing import Any


def generate_each(
    config: str, plan: Sequence[str], runs: Mapping[str, Sequence[str]], output: str, world: int
) -> dict[str, str]:
    """In a rank: what tasks/gpt/generation.py does, but for starting Paddle.

    Args:
        config: the YAML file.
        plan: overrides that all runs have in common.
        runs: overrides of each run.
        output: beginning of the names of the files that results are written to.
        world: number of ranks.

    Returns:
        What this rank printed, by run.
    """
    import paddle

    from ppfleetx.commands.generate import check_plan, generate, read_prompts
    from ppfleetx.config.loader import load_config
    from ppfleetx.distributed.context import ParallelContext
    from ppfleetx.distributed.init import init_distributed

    printed, ctx = {}, ParallelContext.single()
    if world > 1:
        ctx = init_distributed(load_config(config, plan, world_size=world))
    for name, overrides in runs.items():
        cfg: Any = load_config(config, [*plan, *overrides], world_size=world)
        check_plan(cfg)
        said = io.StringIO()
        with contextlib.redirect_stdout(said), paddle.utils.unique_name.guard():
            generate(cfg, ctx, read_prompts(cfg), f"{output}{name}.jsonl")
        # Without what is logged while the model is loaded, which a rank writes to where it prints.
        printed[name] = "".join(said.getvalue().partition("Prompt: ")[1:])
    return printed
