"""Turning a list of BPE merges into one rank per token, so that an encoder that joins *bytes* (tiktoken)
gives the ids of an encoder that joins *pairs of tokens* (GPT-2's, ``tokenizers``).

The two differ in principle. With merges, neighbours x and y are joined only if the pair (x, y) is listed;
tiktoken joins them whenever the bytes of x + y are a token. They agree if each token's own bytes, encoded
alone with the merges, come out as that one token. For suppose tiktoken joins x and y to T though (x, y) is
not listed. No merge has crossed the ends of x + y so far, hence the bytes of T alone went through the same
steps and reached (x, y) as well, where the merges stop: T alone would not come out as T.

So `live_ranks` plays the encoding of every token backwards, asking at each moment whether a merge across the
middle would have come first. A token that does not come out as itself can, by the same argument, be produced
by the merges in no text, and is left out. Two listed pairs that build one token: the token's own bytes take
one of the two ways, always the same; the other can never happen.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise


def live_ranks(merges: Sequence[tuple[bytes, bytes]]) -> dict[bytes, int] | None:
    """Rank of every token that the merges can produce, in merge order; single bytes are not listed.

    Args:
        merges: pairs of token bytes, the first being joined first.

    Returns:
        ``{token: index in merges}``, or None when a pair is listed before the merge that makes one of its
        halves (such a merge acts at once and out of order, which ranks cannot express).
    """
    rank: dict[bytes, int] = {}
    halves: dict[bytes, tuple[bytes, bytes]] = {}
    pair_rank: dict[tuple[bytes, bytes], int] = {}
    waiting: set[bytes] = set()
    for index, (left, right) in enumerate(merges):
        unmade = [half for half in (left, right) if len(half) > 1 and half not in rank]
        if unmade:
            waiting.update(unmade)
            continue
        token = left + right
        if token in rank or _is_crossed(left, right, index, rank, halves, pair_rank):
            continue
        if token in waiting:
            return None
        rank[token] = index
        halves[token] = (left, right)
        pair_rank[left, right] = index
    return rank


def _is_crossed(
    left: bytes,
    right: bytes,
    own_rank: int,
    rank: dict[bytes, int],
    halves: dict[bytes, tuple[bytes, bytes]],
    pair_rank: dict[tuple[bytes, bytes], int],
) -> bool:
    """Whether, while ``left + right`` is encoded alone, something is joined across the border of the two.

    Goes back in time. At each moment ``left`` and ``right`` are the tokens touching the border, and
    ``left_end`` and ``right_end`` the ranks of the merges that ended them. Equal ranks act from left to
    right: a crossing merge loses against one that ends the left token, and wins against one that ends the
    right.
    """
    left_end = right_end = own_rank
    while True:
        crossing = pair_rank.get((left, right))
        if crossing is not None and crossing < left_end and crossing <= right_end:
            return True
        left_made, right_made = rank.get(left, -1), rank.get(right, -1)
        if left_made < 0 and right_made < 0:
            return False
        if right_made >= left_made:
            right_end = right_made
            right = halves[right][0]
        else:
            left_end = left_made
            left = halves[left][1]


def split_by_ranks(text: bytes, rank: dict[bytes, int]) -> list[bytes]:
    """Tokens of ``text`` as one piece: the neighbours of lowest rank are joined, the leftmost first."""
    parts = [text[i : i + 1] for i in range(len(text))]
    never = len(rank) + max(rank.values(), default=0) + 1
    while len(parts) > 1:
        ranks = [rank.get(left + right, never) for left, right in pairwise(parts)]
        first = min(range(len(ranks)), key=ranks.__getitem__)
        if ranks[first] == never:
            break
        parts[first : first + 2] = [parts[first] + parts[first + 1]]
    return parts
