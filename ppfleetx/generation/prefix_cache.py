"""Prefix caching: reuse the keys and values of earlier sequences for prompts that start with the same tokens,
such as later turns of a chat. The cache evicts the least recently used sequences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from ppfleetx.generation.kv_cache import Layers

SHORTEST = 16
"""The shortest prefix, in tokens, that is worth reusing."""


@dataclass
class _Entry:
    tokens: np.ndarray  # [n] int64
    is_long: bool
    layers: Layers  # [1, g, n, d]


@dataclass(frozen=True)
class SeededPrompts:
    """New prompts that start with the same cached prefix and run as one batch. ``prompts`` are the token
    ids of each prompt, prefix included. ``length`` is the number of tokens of the prefix, and ``layers``
    are the keys and values of a cached sequence that starts with the prefix."""

    prompts: list[Sequence[int]]
    length: int = 0
    layers: Layers = field(default_factory=dict)

    @property
    def rests(self) -> list[Sequence[int]]:
        return [prompt[self.length :] for prompt in self.prompts]


class PrefixStore:
    """The prefix cache: an LRU store of the keys and values of earlier sequences. It holds ``num_tokens``
    positions, at most ``max_tokens``. ``num_reused`` counts the prompt positions taken from it so far."""

    def __init__(self, max_tokens: int) -> None:
        self.max_tokens, self.num_tokens, self.num_reused = max_tokens, 0, 0
        self._entries: list[_Entry] = []  # the most recently used last

    def groups(
        self, prompts: Sequence[Sequence[int]], are_long: Sequence[bool] | None = None
    ) -> list[SeededPrompts]:
        """Divide new prompts into groups of consecutive prompts that start with the same cached prefix and
        can run as one batch. ``are_long`` says which prompts use LongRoPE's factors for long sequences."""
        groups: list[SeededPrompts] = []
        last = None
        for prompt, is_long in zip(prompts, are_long or [False] * len(prompts), strict=True):
            length, layers = self._longest_prefix(prompt, is_long)
            if (beginning := (is_long, *prompt[:length])) != last:
                groups.append(SeededPrompts([], length, layers))
            groups[-1].prompts.append(prompt)
            last = beginning
        return groups

    def wants(self, tokens: Sequence[int], is_long: bool = False) -> bool:
        """Return whether the keys and values of the sequence ``tokens`` are worth storing. They are if at
        least `SHORTEST` of its first ``max_tokens`` positions are not in the store yet.
        """
        # -1 is added, because _longest_prefix ignores the last token.
        known = self._longest_prefix([*tokens, -1], is_long)[0]
        return min(len(tokens), self.max_tokens) - known >= SHORTEST

    def put(self, tokens: Sequence[int], layers: Layers, is_long: bool = False) -> None:
        """Store the keys and values of a sequence, and evict others to make room. ``tokens`` are the
        sequence's token ids, at most ``max_tokens``. In ``layers``, the keys and the values of a layer are
        [1, key/value heads, number of tokens, head size]. ``is_long`` tells whether the sequence uses
        LongRoPE's factors for long sequences."""
        new = _Entry(np.array(tokens, np.int64), is_long, layers)
        # The new entry replaces entries that are its prefixes.
        self._entries = [
            one for one in self._entries if _num_reusable(one, new.tokens, is_long) < len(one.tokens)
        ]
        self._entries.append(new)
        sizes = [len(one.tokens) for one in self._entries]
        while sum(sizes) > self.max_tokens:
            del self._entries[0], sizes[0]
        self.num_tokens = sum(sizes)

    def _longest_prefix(self, prompt: Sequence[int], is_long: bool) -> tuple[int, Layers]:
        """Return the length of the longest cached prefix of a prompt, and the keys and values of the stored
        sequence that starts with this prefix. Returns 0 and an empty dictionary if the prefix is shorter
        than `SHORTEST`. The prefix never includes the prompt's last token. The stored sequence is marked as
        the most recently used."""
        # The model must run the last token to get logits.
        array = np.array(prompt[:-1], np.int64)
        lengths = [_num_reusable(one, array, is_long) for one in self._entries]
        best = max(range(len(lengths)), key=lengths.__getitem__, default=None)
        if best is None or lengths[best] < SHORTEST:
            return 0, {}
        self._entries.append(self._entries.pop(best))
        return lengths[best], self._entries[-1].layers


def _num_reusable(entry: _Entry, tokens: np.ndarray, is_long: bool) -> int:
    """Return how many leading positions of the stored sequence ``entry`` can be reused for a sequence that
    starts with ``tokens``.
    """
    return shared(entry.tokens, tokens) if entry.is_long == is_long else 0


def shared(one: np.ndarray | Sequence[int], other: np.ndarray | Sequence[int]) -> int:
    """Return the length of the common prefix of two sequences."""
    size = min(len(one), len(other))
    differs = np.flatnonzero(np.asarray(one[:size]) != np.asarray(other[:size]))
    return int(differs[0]) if len(differs) else size
