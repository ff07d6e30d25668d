"""A tokenizer, texts and corpora that the data tests share."""

import random
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from ppfleetx.data.indexed_dataset import IndexedDatasetWriter, TokenStore
from ppfleetx.data.tokenizer.tokenizer import Tokenizer
from tests.helpers.texts import random_text, small_tokenizer

WriteCorpus = Callable[..., str]


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return small_tokenizer()


@pytest.fixture(scope="session")
def texts() -> list[str]:
    """More than one block of a zstandard frame (128 KiB)."""
    rng = random.Random(4)
    return [" ".join(["x", *random_text(rng).split()]) for _ in range(2000)]


def sequences(corpus: TokenStore) -> list[list[int]]:
    return [corpus.get(index).tolist() for index in range(len(corpus))]


@pytest.fixture
def write_corpus(tmp_path: Path) -> WriteCorpus:
    """``write_corpus(documents, name="corpus", dtype="u2") -> prefix``, one sequence per document."""

    def write(documents: Sequence[Sequence[int]], name: str = "corpus", dtype: str = "u2") -> str:
        prefix = str(tmp_path / name)
        with IndexedDatasetWriter(prefix, dtype) as writer:
            for document in documents:
                writer.add_document(np.array(document, dtype), [len(document)])
        return prefix

    return write


@pytest.fixture
def toy_documents() -> list[list[int]]:
    """The 137 documents whose files and index arrays were made once with Megatron-LM d98e8a64."""
    return [[(i * 131 + j * 17) % 50000 for j in range(5 + (i * 37) % 91)] + [50256] for i in range(137)]


@pytest.fixture
def toy_prefix(write_corpus: WriteCorpus, toy_documents: list[list[int]]) -> str:
    """The toy corpus on disk."""
    return write_corpus(toy_documents, "toy")
