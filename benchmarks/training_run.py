"""One training run by the command, for the benchmarks that compare losses."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
TINY = ROOT / "ppfleetx/configs/nlp/gpt/pretrain_gpt_tiny.yaml"


def records_of_run(
    config: Path, keys: Mapping[str, object], overrides: Sequence[str] = (), *, one_thread: bool = False
) -> list[dict[str, Any]] | None:
    """Train without checkpoints. Return the records of ``metrics.jsonl``; None if the run diverged."""
    with tempfile.TemporaryDirectory() as directory:
        own = {
            "Engine.logging_freq": 1,
            "Engine.save_load.save_steps": 0,
            "Engine.save_load.output_dir": directory,
        }
        given = [*(f"{key}={value}" for key, value in (own | {**keys}).items()), *overrides]
        done = subprocess.run(
            [sys.executable, str(ROOT / "tools/train.py"), "-c", str(config)]
            + [word for override in given for word in ("-o", override)],
            cwd=ROOT,
            env=os.environ | ({"OMP_NUM_THREADS": "1"} if one_thread else {}),
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            if re.search(r"not finite|\b(nan|inf)\b", done.stderr.lower()):
                return None
            raise SystemExit(done.stderr[-2000:])
        lines = (Path(directory) / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]
