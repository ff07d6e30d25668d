"""Runtime checks find data and weights that must be equal, or different, between ranks."""

import re

import pytest

from ppfleetx.config.parallel_plan import ParallelPlan
from ppfleetx.distributed.consistency_checks import NonFinitePlace, first_place
from ppfleetx.distributed.context import ParallelContext


def told(pools, size, case, **arguments):
    """What all ranks of a job tell of a case."""
    messages = pools(size).run(f"tests.distributed.job_cases:{case}", **arguments)
    assert len(set(messages)) == 1, messages
    return messages[0]


def test_configurations(pools):
    assert told(pools, 2, "configurations", differ=False) == "nothing"
    message = told(pools, 2, "configurations", differ=True)
    assert "ranks 0 and 1 run different configurations: Model.num_layers (2 and 3)" in message


IN_BFLOAT16 = ["Engine.mix_precision.enable=auto", "Engine.mix_precision.dtype=bfloat16"]


@pytest.mark.parametrize(
    ("options", "missing", "expected"),
    [
        ([], {}, None),
        ([], {"ops": [0, 1, 2], "bfloat16": [1]}, None),
        ([], {"ops": [2]}, "ranks 0 and 2 .* CPU operators .'compiled' and 'operators are not compiled"),
        (IN_BFLOAT16, {"bfloat16": [0]}, "ranks 0 and 1 .* bfloat16 on the CPU .*ppfleetx.nn.cpu_ops"),
        (["Optimizer.muon.newton_schulz_dtype=auto"], {"bfloat16": [1]}, "bfloat16 on the CPU"),
        (["Engine.checks=off"], {"ops": [1]}, None),
    ],
)
def test_operators_for_cpus(pools, options, missing, expected):
    message = told(pools, 3, "operators", options=options, missing=missing)
    assert message == "nothing" if expected is None else re.search(expected, message)


@pytest.mark.parametrize("degrees", [{"dp": 2}, {"sharding": 2}, {"mp": 2}, {"pp": 2}, {"sep": 2}], ids=str)
def test_copies_of_a_weight(pools, degrees):
    """One different bit is found in replicas, in weights that mp ranks hold in full, and in tied copies on
    two stages."""
    case = {"degrees": degrees, "offset_by_rank": False}
    assert told(pools, 2, "copies", spoilt_rank=None, **case) == "nothing"
    message = told(pools, 2, "copies", spoilt_rank=1, **case)
    assert "copies that must be equal are not, 1 of 1 tensors: weight on ranks 0 and 1" in message


def test_slices_of_a_weight_are_no_copies(pools):
    assert told(pools, 2, "copies", degrees={"mp": 2}, spoilt_rank=1, offset_by_rank=True) == "nothing"


@pytest.mark.parametrize(
    ("kind", "degrees", "readers", "expected"),
    [
        ("digests", {"dp": 2, "mp": 2}, [0, 0, 1, 1], "nothing"),
        ("digests", {"dp": 2, "mp": 2}, [0, 1, 1, 1], "ranks 0 and 1 belong to the same data rank 0"),
        ("digests", {"dp": 2, "pp": 2}, [0, 0, 1, 2], "ranks 2 and 3 belong to the same data rank 1"),
        ("digests", {"sharding": 2, "sep": 2}, [5, 5, 5, 5], "ranks 0 and 2 are data ranks 0 and 1"),
        ("samples", {"dp": 2}, [0, 1], "nothing"),
        ("samples", {"dp": 2}, [1, 1], "both read sample 4"),
    ],
    ids=str,
)
def test_batches_and_samples(pools, kind, degrees, readers, expected):
    assert expected in told(pools, len(readers), "batches", degrees=degrees, readers=readers, kind=kind)


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
    from ppfleetx.distributed import consistency_checks

    found = [None if place is None else NonFinitePlace(*place, "layer", "", 0) for place in places]
    told = [None if place is None else vars(place) for place in found]
    monkeypatch.setattr(consistency_checks, "gather", lambda ctx, value: told)
    ctx = ParallelContext(ParallelPlan(pp=2))
    result = first_place(ctx, found[0])
    assert (result and (result[0], result[1].index)) == expected
