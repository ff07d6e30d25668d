"""Build the index maps of a configuration ahead of a run, and print their sizes and the hash of their order.

The run finds them in Data.<mode>.dataset.cache_dir (or beside the corpus) and starts at once. The hash is
what a checkpoint remembers: equal hashes mean the same samples in the same order.
"""

from __future__ import annotations

import argparse
import time

from ppfleetx.config.counts import counted
from ppfleetx.utils.cli import add_config_arguments


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command line."""
    add_config_arguments(parser)


def run(args: argparse.Namespace) -> None:
    """Build what is missing, mode by mode."""
    from ppfleetx.config.loader import load_config
    from ppfleetx.data.build import build_dataloader
    from ppfleetx.data.verify import verify_corpora
    from ppfleetx.utils.log import configure_logging

    configure_logging()
    cfg = load_config(args.config, args.override)
    verify_corpora(cfg, ("Train", "Eval", "Test"))
    for mode in ("Train", "Eval", "Test"):
        if getattr(cfg.Data, mode) is None:
            print(f"{mode}: not configured")
            continue
        started = time.perf_counter()
        loader = build_dataloader(cfg, mode, data_size=cfg.plan.data_size)
        print(f"{mode}: {loader.describe()}")
        print(
            f"{mode}: {counted(len(loader.dataset), 'sample', ',')} prepared, order {loader.fingerprint}, "
            f"{time.perf_counter() - started:.1f} s"
        )
