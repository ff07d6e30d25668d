"""Prefix caching: reuse the keys and values of earlier sequences for prompts that start with the same tokens.

Chats share a system message, and each turn repeats all earlier turns. Keys and values of a prefix do not
depend on later tokens, up to float rounding. (With LongRoPE, they do depend on whether the row is long.) The
store holds a limited number of positions, and evicts the least recently used sequences.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby

import numpy as np

from ppfleetx.generation.cache import Layers

SHORTEST = 16
"""The shortest prefix, in tokens, that is worth reusing."""


@dataclass
class _Entry:
    tokens: np.ndarray  # [n] int64
    is_long: bool
    layers: Layers  # [1, g, n, d]


@dataclass(frozen=True)
class SeededPrompts:
    """Prompts that start with the same cached prefix and run as one batch.

    Attributes:
        prompts: the full token ids of each prompt.
        length: the length of the prefix in tokens.
        layers: cached keys and values, for at least ``length`` positions.
    """

    prompts: list[Sequence[int]]
    length: int = 0
    layers: Layers = field(default_factory=dict)

    @property
    def rests(self) -> list[Sequence[int]]:
        return [prompt[self.length :] for prompt in self.prompts]


class PrefixStore:
    """An LRU store of the keys and values of earlier sequences.

    Attributes:
        max_tokens: the maximum number of positions in the store.
        num_tokens: the number of positions in the store now.
        num_reused: the number of prompt positions that did not have to be computed.
    """

    def __init__(self, max_tokens: int) -> None:
        self.max_tokens, self.num_tokens, self.num_reused = max_tokens, 0, 0
        self._entries: list[_Entry] = []  # the most recently used last

    def groups(
        self, prompts: Sequence[Sequence[int]], are_long: Sequence[bool] | None = None
    ) -> list[SeededPrompts]:
        """Group consecutive prompts (token ids) that start with the same cached prefix.

        Args:
            are_long: for each prompt, whether it uses LongRoPE's factors for long rows; None for models
                without LongRoPE.
        """
        kinds = are_long or [False] * len(prompts)
        found = [(prompt, *self._longest(prompt, kind)) for prompt, kind in zip(prompts, kinds, strict=True)]
        keyed = zip(kinds, found, strict=True)
        grouped = groupby(keyed, key=lambda pair: (pair[0], *pair[1][0][: pair[1][1]]))
        parts = [[one for _, one in members] for _, members in grouped]
        return [SeededPrompts([one[0] for one in part], part[0][1], part[0][2]) for part in parts]

    def wants(self, tokens: Sequence[int], is_long: bool = False) -> bool:
        """Whether ``tokens`` are worth storing: long enough, and not in the store yet."""
        known = self._longest([*tokens, -1], is_long)[0]  # add a token, because _longest ignores the last
        return min(len(tokens), self.max_tokens) - known >= SHORTEST

    def put(self, tokens: Sequence[int], layers: Layers, is_long: bool = False) -> None:
        """Store the keys and values ``[1, g, n, d]`` of n ``tokens``, at most ``max_tokens``.

        ``is_long`` says whether the row uses LongRoPE's factors for long rows.
        """
        new = _Entry(np.array(tokens, np.int64), is_long, layers)
        # The new entry replaces entries that are its prefixes.
        self._entries = [one for one in self._entries if _match(one, new.tokens, is_long) < len(one.tokens)]
        self._entries.append(new)
        sizes = [len(one.tokens) for one in self._entries]
        while sum(sizes) > self.max_tokens:
            del self._entries[0], sizes[0]
        self.num_tokens = sum(sizes)

    def _longest(self, prompt: Sequence[int], is_long: bool) -> tuple[int, Layers]:
        """The length of the longest cached prefix of a prompt, and its keys and values. The last token is
        never part of the prefix, because its logits must be computed."""
        array = np.array(prompt[:-1], np.int64)
        lengths = [_match(one, array, is_long) for one in self._entries]
        best = max(range(len(lengths)), key=lengths.__getitem__, default=None)
        if best is None or lengths[best] < SHORTEST:
            return 0, {}
        self._entries.append(self._entries.pop(best))
        return lengths[best], self._entries[-1].layers


def _match(entry: _Entry, tokens: np.ndarray, is_long: bool) -> int:
    """How many leading positions of an entry can be reused for a row with these ``tokens``."""
    return shared(entry.tokens, tokens) if entry.is_long == is_long else 0


def shared(one: np.ndarray | Sequence[int], other: np.ndarray | Sequence[int]) -> int:
    """The length of the common prefix of two sequences."""
    size = min(len(one), len(other))
    differs = np.flatnonzero(np.asarray(one[:size]) != np.asarray(other[:size]))
    return int(differs[0]) if len(differs) else size
