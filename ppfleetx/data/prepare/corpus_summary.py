"""What a tokenised corpus holds, for people and programs."""

from __future__ import annotations

from typing import Any

import numpy as np

from ppfleetx.config.counts import counted
from ppfleetx.data.checksums import read_checksums
from ppfleetx.data.corpus_paths import open_tokens
from ppfleetx.data.token_store import TokenStore

_CHUNK = 1 << 22  # tokens read at a time


def summary(prefix: str) -> dict[str, Any]:
    """Numbers of a corpus, in plain types.

    Raises:
        DataError: it is missing or damaged.
    """
    corpus = open_tokens(prefix)
    sizes = corpus.sizes
    return {
        "prefix": corpus.prefix,
        "documents": corpus.document_indices.shape[0] - 1,
        "sequences": len(corpus),
        "tokens": corpus.num_tokens,
        "dtype": str(corpus.dtype),
        "shortest_sequence": int(sizes.min()) if len(corpus) else 0,
        "longest_sequence": int(sizes.max()) if len(corpus) else 0,
        "largest_id": largest_id(corpus),
        "fingerprint": corpus.fingerprint,
        "has_checksums": read_checksums(corpus.prefix) is not None,
    }


def largest_id(corpus: TokenStore) -> int:
    """The largest token id, -1 in a corpus without tokens; reads all of them."""
    chunks = range(0, corpus.num_tokens, _CHUNK)
    return int(max((np.max(corpus.flat(first, first + _CHUNK)) for first in chunks), default=-1))


def summary_text(facts: dict[str, Any]) -> str:
    """`summary` as a few lines."""
    lines = [
        f"{facts['prefix']}: {counted(facts['documents'], 'document', ',')}, "
        f"{counted(facts['sequences'], 'sequence', ',')}, {counted(facts['tokens'], 'token', ',')} "
        f"({facts['dtype']})",
        f"sequences of {facts['shortest_sequence']:,} to {counted(facts['longest_sequence'], 'token', ',')}, "
        f"ids up to {facts['largest_id']:,}",
        f"fingerprint {facts['fingerprint']}",
        "it has checksums; --verify compares them"
        if facts["has_checksums"]
        else "it has no checksums; --write-checksums makes them",
    ]
    return "\n".join(lines)
