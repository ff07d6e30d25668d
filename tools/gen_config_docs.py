"""Write docs/config.md and ppfleetx/configs/schema.json from the configuration's section models."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from ppfleetx.utils.cli import run_tool

_ROOT = Path(__file__).resolve().parents[1]


def main() -> int:
    """Write the files; with ``--check`` only say whether they are up to date."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if a file is stale")
    args = parser.parse_args()
    from ppfleetx.config.docs import config_markdown, json_schema

    texts = {
        _ROOT / "docs" / "config.md": config_markdown(),
        _ROOT / "ppfleetx" / "configs" / "schema.json": json.dumps(json_schema(), indent=1) + "\n",
    }
    stale = [path for path, text in texts.items() if not path.exists() or path.read_text("utf-8") != text]
    for path in stale:
        print(f"{'stale' if args.check else 'written'}: {path.relative_to(_ROOT)}")
        if not args.check:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(texts[path], "utf-8")
    return 1 if args.check and stale else 0


if __name__ == "__main__":
    run_tool(main)
