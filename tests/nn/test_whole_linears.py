"""Adapters and learned bounds beside linears that every tensor-parallel rank has whole."""

import pytest

GRADIENTS = "tests.nn.whole_linears:gradients"


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("of_trunk", [False, True])
def test_gradients_are_those_of_one_card(pools, sequence_parallel, of_trunk):
    (one,) = pools(1).run(GRADIENTS, mp=1, sequence_parallel=False, of_trunk=of_trunk)
    for rank in pools(2).run(GRADIENTS, mp=2, sequence_parallel=sequence_parallel, of_trunk=of_trunk):
        assert set(rank) == set(one) == {"weight", "quant.weight_clip", "quant.input_clip", "a", "b"}
        for name, values in one.items():
            assert any(values), name
            assert rank[name] == pytest.approx(values, rel=1e-5, abs=1e-6), name
