"""Implement ``ppfleetx export`` and ``ppfleetx serve``."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from ppfleetx.commands.model_verbs import ModelOptions
from ppfleetx.commands.options import option
from ppfleetx.config.errors import ConfigError
from ppfleetx.utils.launcher_env import world_size


@dataclass(frozen=True, kw_only=True)
class Export(ModelOptions):
    """Export a checkpoint as a stand-alone program that generates text. The checkpoint can be from a run with
    any parallel plan.
    """

    examples = """\
examples:
  ppfleetx export output --output exported
  ppfleetx infer exported "Once upon a time"
"""
    output: str | None = option(
        "where the export is written (Engine.save_load.output_dir)",
        key="Engine.save_load.output_dir",
        metavar="DIR",
    )

    def run(self) -> None:
        """Export the checkpoint ``Engine.save_load.ckpt_dir`` to ``rank_0/`` in the output directory."""
        from ppfleetx.commands.generate import check_checkpoint, load_generator
        from ppfleetx.commands.initialize import start_with
        from ppfleetx.commands.resolve_model import as_replicas
        from ppfleetx.config.loader import load_config
        from ppfleetx.core.engine.check_output_dir import run_traces
        from ppfleetx.deploy.export import (
            check_adapters,
            check_one_process,
            check_positions,
            check_target,
            export,
        )
        from ppfleetx.deploy.export_dir import check_generation
        from ppfleetx.utils.log import get_logger

        with self.job() as job:
            check_one_process(world_size())
            cfg, notes = as_replicas(load_config(job.config, job.overrides), 1)
            check_generation(cfg.Generation, cfg.origins)
            check_checkpoint(cfg)
            check_target(cfg)
            if self.output is not None and (traces := run_traces(Path(self.output))):
                raise ConfigError(
                    f"holds a run or a model ({', '.join(traces)}); name another directory",
                    key="--output",
                    value=self.output,
                )
            check_adapters(cfg)
            check_positions(cfg)
            cfg, ctx = start_with(cfg)
            for note in notes:
                get_logger().info(f"NOTE: {note}")
            export(cfg, ctx, load_generator(cfg, ctx))


@dataclass(frozen=True, kw_only=True)
class Serve(ModelOptions):
    """Serve a checkpoint over HTTP, with OpenAI's API (completions, chat, embeddings) and a web page to try
    the model."""

    examples = """\
examples:
  ppfleetx serve output
  ppfleetx serve output --port 9000 -o Serve.max_batch_size=32
"""
    port: int | None = option("port of the server (default: Serve.port)", key="Serve.port")

    def run(self) -> None:
        from ppfleetx.commands.generate import check_checkpoint, load_generator
        from ppfleetx.commands.initialize import start_with
        from ppfleetx.config.loader import load_config
        from ppfleetx.config.rules import check_one_process
        from ppfleetx.deploy.server import run as server

        with self.job() as job:
            cfg = load_config(job.config, job.overrides)
            server.check_libraries()
            check_one_process(cfg, "the server", world_size())
            server.check_generation(cfg)
            check_checkpoint(cfg)
            api_key, adapters = server.read_api_key(cfg, os.environ), server.read_adapters(cfg)
            with server.open_socket(cfg) as listener:
                cfg, ctx = start_with(cfg)
                service = server.build_service(cfg, load_generator(cfg, ctx), api_key, adapters)
                server.serve(service, listener)
