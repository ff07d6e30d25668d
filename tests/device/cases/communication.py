"""In ranks: every collective on the device, and what a group does with a strided tensor."""

from __future__ import annotations

import paddle
import paddle.distributed as dist


def every_collective(device: str, dtype: str, shape: list[int]) -> int:
    """Each against NumPy; number of ranks."""
    paddle.set_device(device)
    from tests.distributed.cpu import cases

    return cases.every_collective(dtype, shape)


def within_a_group(device: str, members: list[int], dtype: str) -> list[float]:
    """Sum over some of the ranks; ranks that are no members keep what they have."""
    paddle.set_device(device)
    from tests.distributed.cpu import cases

    group = cases.group_of(members)
    x = paddle.full([3], float(dist.get_rank() + 1), dtype)
    if dist.get_rank() in members:
        dist.all_reduce(x, group=group)
    return x.astype("float32").tolist()


def rows_of_experts(device: str, ep: int, emp: int, route: str) -> float:
    """Largest difference of rows that travel to experts and back from those of one rank."""
    paddle.set_device(device)
    from tests.nn.token_dispatcher_cases import worst_difference

    return worst_difference(ep, emp, route)


def strided(device: str) -> str:
    """What becomes of a transposed view in a collective: ``refused``, or the sum's first row."""
    from tests.distributed.cpu import cases

    paddle.set_device(device)
    cases.start()
    x = paddle.arange(6, dtype="float32").reshape([2, 3]).transpose([1, 0])
    assert not x.is_contiguous()
    try:
        dist.all_reduce(x)
    except Exception as error:  # noqa: BLE001  (its type is Paddle's own; the text is judged)
        return f"refused: {str(error).strip().splitlines()[-1]}"
    return str(x.numpy()[0].tolist())
