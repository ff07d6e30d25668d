"""Every operation of the CPU process groups against NumPy, on 2 to 4 ranks and all types."""

import pytest

CASES = "tests.distributed.cpu.cases:"
DTYPES = ["float32", "float64", "int32", "int64", "uint8", "bool", "float16", "bfloat16"]


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_collective(pools, size, dtype):
    for shape in ([1], [5, 3], [3000, 4]):  # the last one is large enough for the two-step all-reduce
        assert pools(size).run(CASES + "every_collective", dtype=dtype, shape=shape) == [size] * size


@pytest.mark.parametrize("size", [2, 3])
def test_large_payloads(pools, size):
    pools(size).run(CASES + "every_collective", dtype="float32", shape=[400000])
    pools(size).run(CASES + "ring", rounds=2, count=400000)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("count", [1000, 30001])
def test_sum_is_in_rank_order_and_equal_on_all_ranks(pools, dtype, count):
    results = pools(4).run(CASES + "bits_of_sum", count=count, dtype=dtype)
    assert [right for right, _ in results] == [1] * 4
    assert len({checksum for _, checksum in results}) == 1


def test_all_to_all_of_unequal_parts(pools):
    pools(3).run(CASES + "all_to_all_of_unequal_parts")


def test_strided_tensors(pools):
    pools(2).run(CASES + "strided")


def test_ranks_of_tests_refuse_strided_tensors(pools):
    """In tests, sending or filling a strided tensor is an error, as on GPUs."""
    assert pools(2).run(CASES + "strided_refused") == [[], []]


def test_groups_do_not_collide(pools):
    pools(4).run(CASES + "groups_side_by_side")


@pytest.mark.parametrize("count", [200000, 4000000])
def test_sums_travel_while_the_program_computes(pools, count):
    assert pools(3).run(CASES + "in_the_background", count=count) == [True] * 3


@pytest.mark.parametrize("count", [1, 50000])
def test_ring_of_sends_and_receives(pools, count):
    for size in (2, 3, 4):
        pools(size).run(CASES + "ring", rounds=3, count=count)


def test_partial_transfers(pools):
    for size in (2, 4):
        pools(size).run(CASES + "partial", count=64)


def test_traffic_is_the_textbook_volume(pools):
    for size in (2, 4):
        whole = 4 * 12 * size
        expected = {
            "all_reduce": (2, 2 * whole, 2 * 2 * (size - 1) / size * whole),
            "all_gather": (1, size * whole, (size - 1) * whole),
            "reduce_scatter": (1, whole, (size - 1) / size * whole),
            "broadcast": (1, whole, (size - 1) / size * whole),
            "all_to_all": (1, whole, (size - 1) / size * whole),
        }
        for rank, counted in enumerate(pools(size).run(CASES + "counted")):
            measured = {k: (v["calls"], v["payload"], v["sent"]) for k, v in counted.items()}
            assert measured == {**expected, **({"send": (1, whole, whole)} if rank == 0 else {})}
