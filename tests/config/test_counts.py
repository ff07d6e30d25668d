"""Numbers of things in messages."""

import pytest

from ppfleetx.config.counts import counted


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
