"""Parameters of the experts' view beside dense ones: sums, owners, norm and checkpoints equal one card's."""

import numpy as np
import pytest

from ppfleetx.checkpoint.reader import open_checkpoint
from ppfleetx.config.plan import ParallelPlan as Plan
from tests.parity.comparison import fields_of

STEPS = "tests.parallel.experts:steps"


@pytest.fixture(scope="module")
def one_card(comparison, tmp_path_factory):
    directory = str(tmp_path_factory.mktemp("one"))
    (result,) = comparison.pools(1).run(STEPS, plan={}, world_size=1, ep=1, save_to=directory)
    return result


@pytest.mark.parametrize(
    ("plan", "ep"),
    [
        (Plan(dp=2), 2),
        (Plan(mp=2), 2),
        (Plan(dp=4), 2),
        (Plan(dp=4), 4),
        (Plan(dp=2, mp=2), 2),
        (Plan(dp=2, pp=2), 2),
        (Plan(sharding=4), 2),
        (Plan(dp=2, sharding=2, sharding_stage=2), 2),
        (Plan(sharding=4, sharding_stage=3), 2),
        (Plan(sharding=2, sharding_stage=3), 2),
    ],
    ids=lambda value: str(value) if isinstance(value, Plan) else f"ep {value}",
)
def test_experts_train_as_on_one_card(comparison, one_card, tmp_path, plan, ep):
    """Some ranks see no token for their experts, where others of their group do."""
    size, read = plan.world_size, one_card["path"]
    results = comparison.pools(size).run(
        STEPS, plan=fields_of(plan), world_size=size, ep=ep, save_to=str(tmp_path), read=read
    )
    original, saved = open_checkpoint(read), open_checkpoint(results[0]["path"])
    assert set(saved.names()) == set(original.names()) == {"toy.experts", "toy.gain"}
    assert set(saved.keys("optimizer")) == set(original.keys("optimizer"))
    for name in saved.names():
        np.testing.assert_allclose(saved.read(name), original.read(name), rtol=1e-5, atol=1e-6)
    for result in results:
        np.testing.assert_allclose(result["norms"], one_card["norms"], rtol=1e-6)
        for name, state, offset, values in result["loaded"]:
            here = np.array(values, np.float32)
            kind, shape = "optimizer" if state else "model", here.shape
            assert np.array_equal(here, original.read(name, kind, state, offset=tuple(offset), shape=shape))
    written = [name for result in results for name in result["written"]]
    assert written.count("toy.gain") == 1 and written.count("toy.experts") == ep


@pytest.mark.parametrize("plan", [Plan(), Plan(dp=2, ep=2)], ids=str)
def test_a_run_whose_tokens_all_go_to_one_expert_goes_on_and_says_so(comparison, plan):
    call = "tests.parallel.experts:all_to_one_expert"
    (one,) = comparison.pools(1).run(call, plan={}, world_size=1)
    size = plan.world_size
    found = comparison.pools(size).run(call, plan=fields_of(plan), world_size=size) if size > 1 else [one]
    for rank in found:
        np.testing.assert_allclose(rank["losses"], one["losses"], rtol=1e-6)
        assert rank["loads"] == [4.0] * 22
    said, *others = [[text for text in rank["said"] if "without a position" in text] for rank in found]
    assert [text.partition(":")[0] for text in said] == ["layer 0", "layer 1"]  # once each, on the first rank
    assert "3 of 4 get none" in said[0] and not any(others)
