"""Numbers of things in messages."""

import pytest

from ppfleetx.config.message_text import bytes_text, counted, ranks_text


@pytest.mark.parametrize(
    ("count", "noun", "spec", "text"),
    [
        (1, "process", "", "1 process"),
        (0, "process", "", "0 processes"),
        (2, "micro batch", "", "2 micro batches"),
        (1, "micro batch", "", "1 micro batch"),
        (3, "corpus", "", "3 corpora"),
        (12000, "sample", ",", "12,000 samples"),
        (12000, "key/value head", "", "12000 key/value heads"),
    ],
)
def test_one_is_singular(count, noun, spec, text):
    assert counted(count, noun, spec) == text


def test_sizes_and_ranks():
    assert [bytes_text(size) for size in (512, 3 << 20, 1.5 * 2**30)] == ["512 B", "3.0 MiB", "1.5 GiB"]
    ranks = ((3,), (0, 1), (0, 1, 2, 5), (1, 3))
    assert [*map(ranks_text, ranks)] == ["rank 3", "ranks 0, 1", "ranks 0-2, 5", "ranks 1, 3"]
