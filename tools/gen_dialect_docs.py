#!/usr/bin/env python3
"""Write the key tables of docs/dialects/*.md from the translators' own tables."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(_ROOT))

from ppfleetx.utils.cli import run_tool


def main() -> int:
    """Write the pages; with ``--check`` only say whether they are up to date."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if a page is stale")
    args = parser.parse_args()
    from ppfleetx.dialects.docs import filled
    from ppfleetx.dialects.registry import dialects

    stale = 0
    for dialect in dialects().values():
        page = _ROOT / "docs" / "dialects" / f"{dialect.name}.md"
        if not page.exists():
            print(f"not written yet: {page.relative_to(_ROOT)}")
            continue
        text = page.read_text("utf-8")
        if (fresh := filled(text, dialect)) == text:
            continue
        stale += 1
        print(f"{'stale' if args.check else 'written'}: {page.relative_to(_ROOT)}")
        if not args.check:
            page.write_text(fresh, "utf-8")
    return 1 if stale and args.check else 0


if __name__ == "__main__":
    run_tool(main)
