"""Export a checkpoint: mistakes are found before Paddle is loaded, which takes seconds."""

from __future__ import annotations

import os
from collections.abc import Sequence

from ppfleetx.commands.generate import check_checkpoint, load_generator
from ppfleetx.commands.replicas import as_replicas
from ppfleetx.commands.start_process import start_with, world_size
from ppfleetx.config.loader import ConfigSource, load_config
from ppfleetx.deploy.capabilities import check_generation
from ppfleetx.deploy.export import check_adapters, check_one_process, check_target, export
from ppfleetx.utils.log import get_logger


def run(path: ConfigSource, overrides: Sequence[str]) -> None:
    """Export the checkpoint ``Engine.save_load.ckpt_dir`` into ``Engine.save_load.output_dir``/rank_0.

    Raises:
        UserError: it cannot be exported; most mistakes are found before Paddle is loaded.
    """
    check_one_process(world_size(os.environ))
    cfg, notes = as_replicas(load_config(path, overrides), 1)
    check_generation(cfg.Generation, cfg.origins)
    check_checkpoint(cfg)
    check_target(cfg)
    check_adapters(cfg)
    cfg, ctx = start_with(cfg)
    for note in notes:
        get_logger().info(f"NOTE: {note}")
    export(cfg, ctx, load_generator(cfg, ctx))
