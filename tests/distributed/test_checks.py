"""Each runtime check is broken once: what must be equal, or different, between ranks."""

import numpy as np
import paddle
import pytest

from ppfleetx.config.plan import ParallelPlan
from ppfleetx.distributed.checks import NonFinitePlace, NonFiniteSearch, batch_digest, first_place
from ppfleetx.distributed.context import ParallelContext

CASES = "tests.distributed.job_cases:"


def the_same_on_all(messages):
    assert len(set(messages)) == 1, messages
    return messages[0]


def test_configurations(ranks):
    assert the_same_on_all(ranks(2).run(CASES + "configurations", differ=False)) == "nothing"
    message = the_same_on_all(ranks(2).run(CASES + "configurations", differ=True))
    assert "ranks 0 and 1 run different configurations: Model.num_layers (2 and 3)" in message


@pytest.mark.parametrize("degrees", [{"dp": 2}, {"sharding": 2}, {"mp": 2}, {"pp": 2}, {"sep": 2}], ids=str)
def test_copies_of_a_weight(ranks, degrees):
    """Replicas, weights held whole along mp, and tied copies on two stages: one bit is one too many."""
    case = {"degrees": degrees, "offset_by_rank": False}
    assert the_same_on_all(ranks(2).run(CASES + "copies", spoilt_rank=None, **case)) == "nothing"
    message = the_same_on_all(ranks(2).run(CASES + "copies", spoilt_rank=1, **case))
    assert "copies that must be equal are not, 1 of 1 tensors: weight on ranks 0 and 1" in message


def test_slices_of_a_weight_are_no_copies(ranks):
    case = {"degrees": {"mp": 2}, "offset_by_rank": True}
    assert the_same_on_all(ranks(2).run(CASES + "copies", spoilt_rank=1, **case)) == "nothing"


@pytest.mark.parametrize(
    ("degrees", "readers", "expected"),
    [
        ({"dp": 2, "mp": 2}, [0, 0, 1, 1], "nothing"),
        ({"dp": 2, "mp": 2}, [0, 1, 1, 1], "ranks 0 and 1 belong to the same data rank 0"),
        ({"dp": 2, "pp": 2}, [0, 0, 1, 2], "ranks 2 and 3 belong to the same data rank 1"),
        ({"sharding": 2, "sep": 2}, [5, 5, 5, 5], "ranks 0 and 2 are data ranks 0 and 1"),
    ],
    ids=str,
)
def test_batches(ranks, degrees, readers, expected):
    messages = ranks(4).run(CASES + "batches", degrees=degrees, readers=readers, kind="digests")
    assert expected in the_same_on_all(messages)


def test_a_sample_read_twice(ranks):
    run = ranks(2).run
    case = {"degrees": {"dp": 2}, "kind": "samples"}
    assert the_same_on_all(run(CASES + "batches", readers=[0, 1], **case)) == "nothing"
    message = the_same_on_all(run(CASES + "batches", readers=[1, 1], **case))
    assert "both read sample 4" in message


def test_batches_differ_by_samples_and_by_tokens():
    batch = {"sample_ids": np.arange(2), "tokens": np.zeros((2, 3), np.int64)}
    same = {name: array.copy() for name, array in batch.items()}
    assert batch_digest([batch]) == batch_digest([same])
    assert batch_digest([batch]) != batch_digest([{**batch, "sample_ids": np.arange(1, 3)}])
    assert batch_digest([batch]) != batch_digest([{**batch, "tokens": np.eye(2, 3, dtype=np.int64)}])


def _two_layers():
    layers = [paddle.nn.Linear(3, 3), paddle.nn.Linear(3, 3)]
    for index, layer in enumerate(layers):
        for kind, parameter in layer.named_parameters():
            parameter.info = type("Info", (), {"name": f"layers.{index}.{kind}"})
    return layers


def _pass(layers, spoil_gradient=False):
    hidden = layers[0](paddle.ones([2, 3]))
    if spoil_gradient:
        hidden.register_hook(lambda grad: grad * float("nan"))
    layers[1](hidden).sum().backward()


def test_nothing_is_found_where_all_is_finite():
    layers = _two_layers()
    with NonFiniteSearch(enumerate(layers)) as search:
        _pass(layers)
    assert search.place is None


def test_a_parameter_that_is_not_finite_is_named():
    layers = _two_layers()
    layers[1].weight.set_value(np.full([3, 3], np.inf, np.float32))
    with NonFiniteSearch(enumerate(layers)) as search:
        _pass(layers)
    assert (
        str(search.place) == "the output of layer 1 (Linear), whose parameter layers.1.weight is not finite"
    )


def test_a_gradient_that_is_not_finite_is_named_with_its_micro_batch():
    layers = _two_layers()
    with NonFiniteSearch(enumerate(layers)) as search:
        _pass(layers)
        _pass(layers, spoil_gradient=True)
    assert search.place.parameter.startswith("layers.0.")
    assert search.place.micro_batch == 1
    assert "the gradient of layers.0." in str(search.place)


def test_after_the_search_nothing_is_looked_at():
    layers = _two_layers()
    search = NonFiniteSearch(enumerate(layers))
    with search:
        pass
    _pass(layers, spoil_gradient=True)
    assert search.place is None


@pytest.mark.parametrize(
    ("places", "expected"),
    [
        ([None, None], None),
        ([(False, 3), (True, 2)], (1, 2)),
        ([(True, 4), (True, 2)], (1, 2)),
        ([(False, 0), (False, 5)], (1, 5)),
    ],
)
def test_the_first_place_of_the_job(monkeypatch, places, expected):
    from ppfleetx.distributed import checks

    found = [None if place is None else NonFinitePlace(*place, "layer", "", 0) for place in places]
    told = [None if place is None else vars(place) for place in found]
    monkeypatch.setattr(checks, "gather", lambda ctx, value: told)
    ctx = ParallelContext(ParallelPlan(pp=2))
    result = first_place(ctx, found[0])
    assert (result and (result[0], result[1].index)) == expected
