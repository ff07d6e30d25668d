"""The verb ``index``."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ppfleetx.commands.options import ConfigOptions
from ppfleetx.config.counts import counted
from ppfleetx.config.errors import ConfigError

if TYPE_CHECKING:
    from ppfleetx.config.sections.root import RunConfig


@dataclass(frozen=True, kw_only=True)
class Index(ConfigOptions):
    """Build the index maps of a configuration ahead of a run; print their sizes and the hash of their order.

    The run finds them in Data.<mode>.dataset.cache_dir (or beside the corpus) and starts at once. The hash is
    what a checkpoint remembers: equal hashes mean the same samples in the same order.
    """

    def run(self) -> None:
        """Build what is missing, mode by mode."""
        from ppfleetx.config.loader import load_config
        from ppfleetx.data.build import build_dataloader
        from ppfleetx.data.verify import verify_corpora
        from ppfleetx.utils.log import configure_logging
        from ppfleetx.utils.progress import ProgressBar

        configure_logging()
        cfg = load_config(self.config, self.override)
        parts = [("Train", "Train", cfg), *_evaluation_parts(cfg), ("Test", "Test", cfg)]
        for _, mode, one in parts:
            refuse_unusable_cache(one, mode)
        verify_corpora(cfg, ("Train", "Eval", "Test"))
        for title, mode, one in parts:
            if getattr(one.Data, mode) is None:
                print(f"{title}: not configured")
                continue
            started = time.perf_counter()
            with ProgressBar(f"{title}: index maps", total=None, unit="map"):
                loader = build_dataloader(one, mode, data_size=cfg.plan.data_size)
            print(f"{title}: {loader.describe()}")
            samples, seconds = counted(len(loader.dataset), "sample", ","), time.perf_counter() - started
            print(f"{title}: {samples} prepared, order {loader.fingerprint}, {seconds:.1f} s")


def refuse_unusable_cache(cfg: RunConfig, mode: str) -> None:
    """Make Data.<mode>.dataset.cache_dir, in which a run goes on without but this verb has nothing to do.

    Raises:
        ConfigError: it cannot be made, or nothing can be written there.
    """
    section = getattr(cfg.Data, mode)
    if section is None or section.dataset.cache_dir is None:
        return
    key, directory = f"Data.{mode}.dataset.cache_dir", Path(section.dataset.cache_dir)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        rule = "" if os.access(directory, os.W_OK | os.X_OK) else "no file may be created in it"
    except OSError as error:
        rule = f"cannot be made: {error.strerror}"
    if rule:
        raise ConfigError(rule, key=key, value=directory, place=cfg.origins.get(key))


def _evaluation_parts(cfg: RunConfig) -> list[tuple[str, str, RunConfig]]:
    """(title, ``Eval``, configuration) of each evaluation set."""
    from ppfleetx.config.sections.root import data_sets

    sets = data_sets(cfg) or {None: cfg}
    return [("Eval" if name is None else f"Eval, {name}", "Eval", one) for name, one in sets.items()]
