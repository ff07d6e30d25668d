"""Build the index maps of a configuration ahead of a run, and print their sizes and the hash of their order.

The run finds them in Data.<mode>.dataset.cache_dir (or beside the corpus) and starts at once. The hash is
what a checkpoint remembers: equal hashes mean the same samples in the same order.
"""

from __future__ import annotations

import argparse
import time
from typing import TYPE_CHECKING

from ppfleetx.config.counts import counted
from ppfleetx.utils.cli import add_config_arguments

if TYPE_CHECKING:
    from ppfleetx.config.sections.root import RunConfig


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command line."""
    add_config_arguments(parser)


def run(args: argparse.Namespace) -> None:
    """Build what is missing, mode by mode."""
    from ppfleetx.config.loader import load_config
    from ppfleetx.data.build import build_dataloader
    from ppfleetx.data.verify import verify_corpora
    from ppfleetx.utils.log import configure_logging
    from ppfleetx.utils.progress import ProgressBar

    configure_logging()
    cfg = load_config(args.config, args.override)
    verify_corpora(cfg, ("Train", "Eval", "Test"))
    parts = [("Train", "Train", cfg), *_evaluation_parts(cfg), ("Test", "Test", cfg)]
    for title, mode, one in parts:
        if getattr(one.Data, mode) is None:
            print(f"{title}: not configured")
            continue
        started = time.perf_counter()
        with ProgressBar(f"{title}: index maps", total=None, unit="map"):
            loader = build_dataloader(one, mode, data_size=cfg.plan.data_size)
        print(f"{title}: {loader.describe()}")
        print(
            f"{title}: {counted(len(loader.dataset), 'sample', ',')} prepared, order {loader.fingerprint}, "
            f"{time.perf_counter() - started:.1f} s"
        )


def _evaluation_parts(cfg: RunConfig) -> list[tuple[str, str, RunConfig]]:
    """(title, ``Eval``, configuration) of each evaluation set."""
    from ppfleetx.config.sections.root import data_sets

    sets = data_sets(cfg) or {None: cfg}
    return [("Eval" if name is None else f"Eval, {name}", "Eval", one) for name, one in sets.items()]
