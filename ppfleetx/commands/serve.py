"""Serve a checkpoint: configuration, port and key are checked first; Paddle and the model come last."""

from __future__ import annotations

import os
from collections.abc import Sequence

from ppfleetx.commands.generate import check_checkpoint, load_generator
from ppfleetx.commands.start_process import start_with, world_size
from ppfleetx.config.loader import ConfigSource, load_config
from ppfleetx.deploy.server.run import (
    build_service,
    check_libraries,
    check_plan,
    open_socket,
    read_api_key,
    serve,
)


def run(path: ConfigSource, overrides: Sequence[str]) -> None:
    """Serve the checkpoint ``Engine.save_load.ckpt_dir`` until SIGINT or SIGTERM.

    Raises:
        UserError: it cannot be served; most mistakes are found before Paddle is loaded.
    """
    cfg = load_config(path, overrides)
    check_libraries()
    check_plan(cfg, world_size(os.environ))
    check_checkpoint(cfg)
    api_key = read_api_key(cfg, os.environ)
    with open_socket(cfg) as listener:
        cfg, ctx = start_with(cfg)
        serve(build_service(cfg, load_generator(cfg, ctx), api_key), listener)
