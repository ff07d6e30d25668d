"""The operators that take the place of Paddle's on the CPU."""

import pytest

CASES = "tests.distributed.cpu.cases:"


@pytest.mark.parametrize(("dtype", "limit"), [("float32", 2e-6), ("float64", 1e-12)])
@pytest.mark.parametrize("size", [2, 3])
def test_parallel_cross_entropy(ranks, size, dtype, limit):
    for differences in ranks(size).run(CASES + "parallel_cross_entropy", dtype=dtype):
        assert max(differences) < limit


@pytest.mark.parametrize("vocab", [49_152, 151_936])
def test_loss_of_an_evaluation_in_columns_of_several_ranks(ranks, vocab):
    assert max(ranks(2).run(CASES + "evaluation_loss", vocab=vocab, padding=256)) < 2e-7


def test_identity(ranks):
    ranks(3).run(CASES + "identity")


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_embedding_in_16_bits(ranks, dtype):
    ranks(2).run(CASES + "embedding_in_half", dtype=dtype)
