"""Logits of a checkpoint under a plan, as the program loads it (called in every rank)."""

from __future__ import annotations


def logits_under_plan(config: str, overrides: list[str], world: int, tokens: list[list[int]]) -> list:
    """This rank's columns of the logits, ``[b, s, columns]`` as nested lists, in float32."""
    import paddle

    from ppfleetx.commands.train import build_runner, find_weights
    from ppfleetx.config.loader import load_config
    from ppfleetx.distributed.init import init_distributed

    cfg = load_config(config, overrides, world_size=world)
    with paddle.utils.unique_name.guard(), paddle.no_grad():
        ctx = init_distributed(cfg)
        runner = build_runner(cfg, ctx, train=False)
        find_weights(cfg, ctx).restore_weights(runner, cfg.Model)
        runner.model.eval()
        return runner.model(paddle.to_tensor(tokens)).transpose([1, 0, 2]).tolist()
