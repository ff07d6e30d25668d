"""Bytes each plan sends per step, counted by the CPU backend, against the textbook's formulas.

n ranks, ring algorithms: an all-reduce of S bytes makes a rank send 2 (n-1)/n S, an all-gather or
reduce-scatter (n-1)/n S, an all-to-all of S local bytes (n-1)/n S; a broadcast from and a reduction to an
owner count as (n-1)/n S a rank, as the halves of an all-reduce. The scalars of a step (loss, token count,
norm) and the shapes a pipeline announces are not in the formulas: they are why 1% is allowed.
"""

from __future__ import annotations

import pytest

from tests.distributed.volume import GLOBAL_BATCH, MODEL, SEQ_LEN, VOCAB

MICRO = 2
HIDDEN, LAYERS = MODEL["hidden_size"], MODEL["num_layers"]
PARAMETERS = 236_928
FLOAT = 4
ACTIVATION = FLOAT * SEQ_LEN * MICRO * HIDDEN
EMBEDDING = FLOAT * VOCAB * HIDDEN


def all_reduce(n: int, size: float) -> float:
    return 2 * (n - 1) / n * size


def half(n: int, size: float) -> float:
    """All-gather, reduce-scatter, all-to-all; broadcast and reduction, a mean over the ranks."""
    return (n - 1) / n * size


def tensor_parallel(n: int, micro_batches: int, whole: int) -> float:
    """Per layer two all-reduces of the activation forward and two backward (attention, MLP), one for the
    vocabulary-parallel embedding, one for the head's input gradient; the loss reduces three numbers a token.
    Once a step, the gradients of what every rank holds whole are made equal.
    """
    activations = (4 * LAYERS + 2) * all_reduce(n, ACTIVATION)
    micro_batch = activations + 3 * all_reduce(n, FLOAT * SEQ_LEN * MICRO)
    return micro_batches * micro_batch + all_reduce(n, FLOAT * whole)


def sequence_parallel(n: int, micro_batches: int, whole: int, partial: int) -> float:
    """The same volume, each all-reduce as its two halves; with learned positions the embedding is reduced
    whole and then cut, whose gradient is gathered; gains and row biases have partial gradients to sum."""
    cut = micro_batches * half(n, ACTIVATION)
    return tensor_parallel(n, micro_batches, whole) + cut + all_reduce(n, FLOAT * partial)


def expected(result: dict, degrees: dict[str, int]) -> dict[str, float]:
    """Bytes a rank sends by axis; ``degrees`` are those above 1, and the plan's options."""
    m, gradients = result["micro_batches"], FLOAT * result["parameters"]
    volume = {}
    dp, sep = degrees.get("dp", 1), degrees.get("sep", 1)
    if dp * sep > 1:
        axis = "dp x sep" if dp > 1 and sep > 1 else "dp" if dp > 1 else "sep"
        volume[axis] = all_reduce(dp * sep, gradients)
    if n := degrees.get("mp"):
        if degrees.get("sequence_parallel"):
            volume["mp"] = sequence_parallel(n, m, result["whole"], result["partial"])
        else:
            volume["mp"] = tensor_parallel(n, m, result["whole"])
    if n := degrees.get("pp"):
        ends = result["stage"] in (0, n - 1)
        volume["pp"] = m * ACTIVATION * (1 if ends else 2)
        volume["tied"] = all_reduce(2, EMBEDDING) if ends else 0.0
    if n := degrees.get("sharding"):
        whole = FLOAT * PARAMETERS
        # Gradients to the owners, then the owners' new values to all: an all-reduce in two halves.
        volume["sharding"] = 2 * half(n, whole)
        if degrees["stage"] == 3:
            # Values before each forward and each backward pass, the tied embedding at both its places.
            volume["sharding"] = half(n, whole) + 2 * m * half(n, whole + EMBEDDING)
    if sep > 1:
        # Heads for positions before attention (q, k and v), back after it, and both again backward.
        exchange = 2 * half(sep, (3 + 1) * ACTIVATION / sep)
        volume["sep"] = volume.get("sep", 0.0) + m * LAYERS * exchange
    return volume


KEYS = {
    "dp": "Distributed.dp_degree",
    "mp": "Distributed.mp_degree",
    "pp": "Distributed.pp_degree",
    "sep": "Distributed.sep_degree",
    "sharding": "Distributed.sharding.sharding_degree",
    "stage": "Distributed.sharding.sharding_stage",
    "sequence_parallel": "Model.sequence_parallel",
}


@pytest.mark.parametrize(
    "degrees",
    [
        {"dp": 2},
        {"dp": 4},
        {"mp": 2},
        {"mp": 4},
        {"mp": 2, "sequence_parallel": True},
        {"pp": 2},
        {"pp": 4},
        {"sharding": 2, "stage": 1},
        {"sharding": 2, "stage": 2},
        {"sharding": 4, "stage": 3},
        {"sep": 2},
        {"dp": 2, "mp": 2},
        {"dp": 2, "pp": 2},
        {"dp": 2, "sep": 2},
    ],
    ids=str,
)
def test_volume_of_a_step(pools, degrees):
    world = 1
    for axis in ("dp", "mp", "pp", "sep", "sharding"):
        world *= degrees.get(axis, 1)
    overrides = {KEYS[key]: value for key, value in degrees.items()}
    case = {"overrides": overrides, "micro_batch_size": MICRO, "world": world}
    for result in pools(world).run("tests.distributed.volume:step", **case):
        assert (
            result["micro_batches"] * MICRO * degrees.get("dp", 1) * degrees.get("sharding", 1)
            == GLOBAL_BATCH
        )
        wanted = expected(result, degrees)
        assert {axis for axis, sent in result["sent"].items() if sent > 200} == {
            a for a in wanted if wanted[a]
        }
        for axis, volume in wanted.items():
            assert result["sent"][axis] == pytest.approx(volume, rel=0.01, abs=100), axis
        if degrees.get("stage") == 3:
            # Before each pass, a message from each owner: of a block, of embedding, last norm and head.
            owners = LAYERS * world + 2 + 2 + 1
            assert result["calls"]["sharding"]["broadcast"] <= 2 * result["micro_batches"] * owners
