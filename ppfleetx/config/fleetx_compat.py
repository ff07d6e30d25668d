"""Spellings of earlier FleetX releases, each rewritten with one warning."""

from __future__ import annotations

from ppfleetx.config.tree import Node


def modernize(tree: Node) -> tuple[Node, tuple[str, ...]]:
    """``tree`` in today's spelling, and a warning for each old one."""
    return tree, ()
