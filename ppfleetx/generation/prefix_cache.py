"""Reuse the keys and values of earlier sequences for prompts with the same prefix.

Chats share their system message, and each turn of a chat begins with all turns before it. The keys and values
of such a prefix do not depend on what follows, so they can be taken from an earlier sequence, up to float
rounding. The store holds a limited number of positions and evicts the least recently used sequences.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby

import numpy as np

from ppfleetx.generation.cache import Layers

SHORTEST = 16
"""The shortest prefix, in positions, whose keys and values are worth copying."""


@dataclass
class _Entry:
    tokens: np.ndarray  # [n] int64
    layers: Layers  # [1, g, n, d]


@dataclass(frozen=True)
class SeededPrompts:
    """Prompts that share a known prefix of ``length`` positions and are run together. ``layers`` are keys
    and values of the prefix, possibly with more positions after it."""

    prompts: list[Sequence[int]]
    length: int = 0
    layers: Layers = field(default_factory=dict)

    @property
    def rests(self) -> list[Sequence[int]]:
        return [prompt[self.length :] for prompt in self.prompts]


class PrefixStore:
    """A store of the keys and values of earlier sequences that evicts the least recently used. It holds at
    most ``max_tokens`` positions; ``num_reused`` counts those that prompts did not have to compute so far."""

    def __init__(self, max_tokens: int) -> None:
        self.max_tokens, self.num_tokens, self.num_reused = max_tokens, 0, 0
        self._entries: list[_Entry] = []  # the most recently used last

    def groups(self, prompts: Sequence[Sequence[int]]) -> list[SeededPrompts]:
        """Group the prompts, in order. Consecutive prompts with the same known prefix form one group."""
        found = [(prompt, *self._longest(prompt)) for prompt in prompts]
        grouped = groupby(found, key=lambda one: tuple(one[0][: one[1]]))
        parts = [list(members) for _, members in grouped]
        return [SeededPrompts([one[0] for one in part], part[0][1], part[0][2]) for part in parts]

    def wants(self, tokens: Sequence[int]) -> bool:
        """Whether ``tokens`` are worth storing: long enough and not known yet."""
        known = self._longest([*tokens, -1])[0]  # plus one, because the last token is ignored
        return min(len(tokens), self.max_tokens) - known >= SHORTEST

    def put(self, tokens: Sequence[int], layers: Layers) -> None:
        """Store the keys and values ``[1, g, n, d]`` of n ``tokens``, at most ``max_tokens``."""
        array = np.array(tokens, np.int64)
        # The new entry replaces those that are prefixes of it.
        self._entries = [one for one in self._entries if shared(one.tokens, array) < len(one.tokens)]
        self._entries.append(_Entry(array, layers))
        sizes = [len(one.tokens) for one in self._entries]
        while sum(sizes) > self.max_tokens:
            del self._entries[0], sizes[0]
        self.num_tokens = sum(sizes)

    def _longest(self, prompt: Sequence[int]) -> tuple[int, Layers]:
        """The length of the longest known prefix of a prompt, never its last token, and its entry."""
        array = np.array(prompt[:-1], np.int64)
        lengths = [shared(one.tokens, array) for one in self._entries]
        best = max(range(len(lengths)), key=lengths.__getitem__, default=None)
        if best is None or lengths[best] < SHORTEST:
            return 0, {}
        self._entries.append(self._entries.pop(best))
        return lengths[best], self._entries[-1].layers


def shared(one: np.ndarray | Sequence[int], other: np.ndarray | Sequence[int]) -> int:
    """The length of the common prefix of two sequences."""
    size = min(len(one), len(other))
    differs = np.flatnonzero(np.asarray(one[:size]) != np.asarray(other[:size]))
    return int(differs[0]) if len(differs) else size
