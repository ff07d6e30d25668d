"""Is each replacement in Paddle still needed? A failure here is good news: its line in the table can go."""

import pytest

CANARIES = "tests.distributed.cpu.canaries:"


@pytest.fixture(scope="module")
def untouched(ranks):
    return ranks(1, PADDLE_UNTOUCHED="1")  # a process in which nothing is installed


def test_every_replacement_is_still_needed(untouched):
    answers = untouched.run(CANARIES + "needed")[0]
    assert answers
    assert [target for target, needed in answers.items() if not needed] == []


def test_nothing_is_installed_on_a_cuda_build(untouched):
    assert untouched.run(CANARIES + "nothing_on_cuda") == [True]


def test_every_replacement_has_a_canary(ranks):
    replaced = ranks(1).run(CANARIES + "replaced")[0]
    watched = ranks(1).run(CANARIES + "watched")[0]
    assert replaced
    assert replaced == watched
