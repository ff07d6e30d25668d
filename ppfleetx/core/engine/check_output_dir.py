"""Check whether a run may start in its output directory.

Does not import Paddle, so that errors are reported before Paddle is loaded.
"""

from __future__ import annotations

import os
from pathlib import Path

from ppfleetx.checkpoint.manifest import MANIFEST_FILE, MARKER_FILE, parse_step_directory
from ppfleetx.checkpoint.output_dir import describe_os_error
from ppfleetx.checkpoint.resolve_checkpoint import open_resolved, resolve_checkpoint, step_directories
from ppfleetx.checkpoint.run_ownership import RUN_FILE, read_run
from ppfleetx.config.errors import ConfigError
from ppfleetx.config.sections.root import RunConfig
from ppfleetx.config.yaml_dump import is_record

_KEY = "Engine.save_load.output_dir"
RESUME, CKPT_DIR, INIT_FROM = (f"Engine.save_load.{name}" for name in ("resume", "ckpt_dir", "init_from"))
CONFIG_FILE, METRICS_FILE = "config.yaml", "metrics.jsonl"


def check_start(cfg: RunConfig) -> None:
    """Raise ConfigError if a run must not start in its output directory, for example because another run has
    left files there. Writes nothing."""
    options, output_dir = cfg.Engine.save_load, output_dir_of(cfg)
    if options.init_from is not None and options.ckpt_dir is not None:
        raise cfg.error(
            CKPT_DIR, "a run starts from weights (init_from) or resumes a checkpoint (ckpt_dir), not both"
        )
    try:
        around = _checkpoint_around(output_dir)
        found = run_traces(output_dir)
    except OSError as error:
        raise directory_error(cfg, f"cannot be read: {describe_os_error(error)}") from error
    if around is not None:
        raise directory_error(
            cfg,
            f"is inside the checkpoint {around}. Checkpoints are deleted as a whole: give the run a "
            "directory beside it",
        )
    if not found or options.resume or options.overwrite or _resumes_within(cfg):
        return
    if found == [CONFIG_FILE] and not is_record(output_dir / CONFIG_FILE):
        raise directory_error(
            cfg,
            f"holds a {CONFIG_FILE} that no run wrote, and a run writes its own configuration under that "
            "name. Rename yours, or give the run another directory",
        )
    raise directory_error(
        cfg,
        f"already holds a run ({', '.join(found)}). To continue it: -o Engine.save_load.resume=auto. To "
        f"start anew: another directory with -o {_KEY}=DIR, or -o Engine.save_load.overwrite=True, which "
        "deletes what that run wrote (except the checkpoint that this run starts from)",
    )


def _checkpoint_around(output_dir: Path) -> Path | None:
    place = Path(os.path.realpath(output_dir))  # unlike resolve(), this accepts circular links
    around = (place, *place.parents)
    return next((p for p in around if (p / MARKER_FILE).is_file() and (p / MANIFEST_FILE).is_file()), None)


def output_dir_of(cfg: RunConfig) -> Path:
    return Path(cfg.Engine.save_load.output_dir)


def directory_error(cfg: RunConfig, rule: str) -> ConfigError:
    return cfg.error(_KEY, rule)


def run_traces(output_dir: Path) -> list[str]:
    """List a run's files in ``output_dir`` for an error message. Example:
    ``["2 checkpoints, ...", "metrics.jsonl"]``."""
    found = sorted(step_directories(output_dir), key=lambda path: parse_step_directory(path.name)[::-1])
    files = [name for name in (RUN_FILE, METRICS_FILE, CONFIG_FILE) if (output_dir / name).is_file()]
    if not found:
        return files
    if len(found) == 1:
        return [f"checkpoint {found[0].name}", *files]
    return [f"{len(found)} checkpoints, {found[0].name} to {found[-1].name}", *files]


def _resumes_within(cfg: RunConfig) -> bool:
    place = cfg.Engine.save_load.ckpt_dir
    path = None if place is None else resolve_checkpoint(place)
    if path is None or not lies_in(path, output_dir_of(cfg)):
        return False
    record = read_run(output_dir_of(cfg))
    return record is None or record.includes(open_resolved(path))


def lies_in(checkpoint: Path, output_dir: Path) -> bool:
    """Return whether the checkpoint is directly inside ``output_dir``. Symbolic links are resolved first."""
    return checkpoint.resolve().parent == output_dir.resolve()
