"""Is each replacement in Paddle still needed? A failure here is good news: its line in the table can go."""

import pytest

CANARIES = "tests.distributed.cpu.canaries:"


@pytest.fixture(scope="module")
def untouched(pools):
    return pools(1, PADDLE_UNTOUCHED="1")  # a process in which nothing is installed


def test_every_replacement_is_still_needed(untouched):
    answers = untouched.run(CANARIES + "needed")[0]
    assert answers
    assert [target for target, needed in answers.items() if not needed] == []


def test_nothing_is_installed_on_a_cuda_build(untouched):
    assert untouched.run(CANARIES + "nothing_on_cuda") == [True]


def test_every_replacement_has_a_canary(pools):
    replaced = pools(1).run(CANARIES + "replaced")[0]
    watched = pools(1).run(CANARIES + "watched")[0]
    assert replaced
    assert replaced == watched


# -- the operators that take the place of Paddle's on the CPU --------------------------------------


CASES = "tests.distributed.cpu.cases:"


@pytest.mark.parametrize(("dtype", "limit"), [("float32", 2e-6), ("float64", 1e-12)])
@pytest.mark.parametrize("size", [2, 3])
def test_parallel_cross_entropy(pools, size, dtype, limit):
    for differences in pools(size).run(CASES + "parallel_cross_entropy", dtype=dtype):
        assert max(differences) < limit


@pytest.mark.parametrize("vocab", [49_152, 151_936])
def test_loss_of_an_evaluation_in_columns_of_several_ranks(pools, vocab):
    assert max(pools(2).run(CASES + "evaluation_loss", vocab=vocab, padding=256)) < 2e-7


def test_identity(pools):
    pools(3).run(CASES + "identity")


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_embedding_in_16_bits(pools, dtype):
    pools(2).run(CASES + "embedding_in_half", dtype=dtype)
