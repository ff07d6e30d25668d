"""The verb ``serve``. Configuration, port and key are checked first; Paddle and the model come last."""

from __future__ import annotations

import os
from dataclasses import dataclass

from ppfleetx.commands.model_options import ModelOptions
from ppfleetx.commands.options import option


@dataclass(frozen=True, kw_only=True)
class Serve(ModelOptions):
    """Serve a checkpoint over HTTP, as OpenAI's completions interface does, with a page to try it."""

    examples = """\
examples:
  ppfleetx serve output
  ppfleetx serve output --port 9000 -o Generation.max_dec_len=200
"""
    port: int | None = option("port of the server (default: Serve.port)", key="Serve.port")

    def run(self) -> None:
        """Serve until SIGINT or SIGTERM."""
        from ppfleetx.commands.generate import check_checkpoint, load_generator
        from ppfleetx.commands.start_process import start_with, world_size
        from ppfleetx.config.loader import load_config
        from ppfleetx.deploy.server import run as server

        with self.job() as job:
            cfg = load_config(job.config, job.overrides)
            server.check_libraries()
            server.check_plan(cfg, world_size(os.environ))
            check_checkpoint(cfg)
            api_key = server.read_api_key(cfg, os.environ)
            with server.open_socket(cfg) as listener:
                cfg, ctx = start_with(cfg)
                server.serve(server.build_service(cfg, load_generator(cfg, ctx), api_key), listener)
