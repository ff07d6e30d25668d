#!/usr/bin/env python3
"""Write the computed parts of docs/parallelism.md: legal plans, conditions, schedules."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(_ROOT))

from ppfleetx.utils.cli import run_tool


def main() -> int:
    """Write the page; with ``--check`` only say whether it is up to date."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit with 1 if the page is stale"
    )
    args = parser.parse_args()
    from ppfleetx.config.plan_docs import filled

    page = _ROOT / "docs" / "parallelism.md"
    text = page.read_text("utf-8")
    if (fresh := filled(text)) == text:
        return 0
    print(f"{'stale' if args.check else 'written'}: {page.relative_to(_ROOT)}")
    if args.check:
        return 1
    page.write_text(fresh, "utf-8")
    return 0


if __name__ == "__main__":
    run_tool(main)
