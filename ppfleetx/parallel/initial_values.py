"""Initial values of a model's parameters, allocated one parameter at a time.

A model for a run is built empty: its parameters have names, shapes and types, but no memory. So every
parameter's owner is known before the first value exists, and no rank ever holds more than the values it keeps
plus one parameter in float32.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import paddle

from ppfleetx.nn.init import Constant
from ppfleetx.nn.stage import first_value
from ppfleetx.optims.on_host import copy_to_host

if TYPE_CHECKING:
    from ppfleetx.parallel.sharding import Sharding


@paddle.no_grad()
def give_values(
    parameters: Iterable[paddle.Tensor],
    seed: int | None,
    with_masters: Iterable[paddle.Tensor],
    sharding: Sharding | None,
    *,
    masters_on_host: bool = False,
) -> dict[str, paddle.Tensor]:
    """Allocate each empty parameter this rank holds, and fill it with its initial value in its own type.

    Args:
        parameters: this rank's parameters.
        seed: the seed of the random values. None draws no values, because a checkpoint will be loaded.
        with_masters: the parameters whose exact float32 values are returned.
        sharding: decides which values and masters this rank keeps; None keeps all.
        masters_on_host: whether masters are kept in host memory.

    Returns:
        The float32 values by canonical name, for master weights.
    """
    masters: dict[str, paddle.Tensor] = {}
    wanted = {id(p) for p in with_masters if sharding is None or sharding.owns(p)}
    for parameter in parameters:
        if parameter._is_initialized() or not (sharding is None or sharding.holds(parameter)):
            continue
        value = _undrawn(parameter) if seed is None else first_value(parameter, seed)
        if id(parameter) in wanted:
            masters[parameter.info.name] = copy_to_host(value) if masters_on_host else value
        if value.dtype != parameter.dtype:
            value = value.astype(parameter.dtype)
        parameter.get_tensor()._share_data_with(value.get_tensor())
    return masters


def _undrawn(parameter: paddle.Tensor) -> paddle.Tensor:
    """A placeholder value that is cheap to make."""
    init = parameter.info.init
    return paddle.full(
        parameter.shape, init.value if isinstance(init, Constant) else 0.0, dtype=parameter.dtype
    )
