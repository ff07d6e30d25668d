"""The operators that take the place of Paddle's on the CPU."""

import pytest

CASES = "tests.distributed.cpu.cases:"


@pytest.mark.parametrize(("dtype", "limit"), [("float32", 2e-6), ("float64", 1e-12)])
@pytest.mark.parametrize("size", [2, 3])
def test_parallel_cross_entropy(ranks, size, dtype, limit):
    for differences in ranks(size).run(CASES + "parallel_cross_entropy", dtype=dtype):
        assert max(differences) < limit


def test_identity(ranks):
    ranks(3).run(CASES + "identity")


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_embedding_in_16_bits(ranks, dtype):
    ranks(2).run(CASES + "embedding_in_half", dtype=dtype)
