"""Every attribute of Paddle that the CPU process groups replace, why, and for which versions.

``TABLE`` is the whole list. Nothing else in Paddle is touched, and nothing at all before
``cpu_backend.install()``. For each line ``tests/distributed/cpu/test_canaries.py`` asks the untouched Paddle
whether the reason still holds; a failing canary means that the line can go.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ppfleetx.distributed.cpu.operators import (
    make_c_embedding,
    make_c_identity,
    make_c_softmax_with_cross_entropy,
)

_OperatorMaker = Callable[[Any], Any]


@dataclass(frozen=True)
class Replacement:
    """One replaced attribute.

    ``make`` gets the original (None where Paddle has none) and returns what takes its place.
    """

    owner: str  # import path of the module, with ":Class" where it is a class attribute
    name: str
    reason: str
    make: _OperatorMaker
    versions: str = "3.3.1"

    @property
    def target(self) -> str:
        return f"{self.owner.replace(':', '.')}.{self.name}"


_applied: dict[str, Any] = {}
_create_process_group: Callable[[int, int, int], Any] | None = None


def apply_patches(create_process_group: Callable[[int, int, int], Any]) -> None:
    """Replace everything in ``TABLE``; a second call does nothing.

    Args:
        create_process_group: makes a group from this process's rank in it, its size and its id.
    """
    global _create_process_group
    _create_process_group = create_process_group
    for entry in TABLE:
        if entry.target not in _applied:
            owner = resolve_owner(entry)
            original = getattr(owner, entry.name, None)
            setattr(owner, entry.name, entry.make(original))
            _applied[entry.target] = original


def resolve_owner(entry: Replacement) -> Any:
    """The module or class an entry's attribute belongs to."""
    path, _, class_name = entry.owner.partition(":")
    module = importlib.import_module(path)
    return getattr(module, class_name) if class_name else module


# -- start-up ---------------------------------------------------------------------------------


def _process_group_factory(original: Callable[..., Any]) -> Callable[..., Any]:
    def new_process_group(
        backend: str, store: Any, rank: int, world_size: int, *args: Any, group_id: int = 0, **kwargs: Any
    ) -> Any:
        if backend != "gloo":
            return original(backend, store, rank, world_size, *args, group_id=group_id, **kwargs)
        return _create_process_group(rank, world_size, group_id)

    return new_process_group


def _no_store(_: Callable[[], Any]) -> Callable[[], None]:
    def create_or_get_global_tcp_store() -> None:
        return None

    return create_or_get_global_tcp_store


_NO_KERNEL = "the CPU kernel only throws"

TABLE: tuple[Replacement, ...] = (
    Replacement(
        "paddle.distributed.collective",
        "_new_process_group_impl",
        "ProcessGroupGloo lacks reduce_scatter, all_to_all and every *_on_calc_stream",
        _process_group_factory,
    ),
    Replacement(
        "paddle.distributed.parallel",
        "_new_process_group_impl",
        "the same function: this module imported it by name",
        _process_group_factory,
    ),
    Replacement(
        "paddle.base.core",
        "create_or_get_global_tcp_store",
        "waits in C++ for ranks that do not come, for 900 seconds, and its error names nobody",
        _no_store,
    ),
    Replacement(
        "paddle.distributed.parallel:ParallelEnv",
        "_device_id",
        "never set on the CPU, yet read by pipeline and recompute",
        lambda _: 0,
    ),
    Replacement("paddle._C_ops", "c_identity", _NO_KERNEL, make_c_identity),
    Replacement(
        "paddle._C_ops", "c_softmax_with_cross_entropy", _NO_KERNEL, make_c_softmax_with_cross_entropy
    ),
    Replacement(
        "paddle._C_ops",
        "c_embedding",
        "its backward corrupts the heap for float16 and is missing for bfloat16; float32 stays Paddle's",
        make_c_embedding,
    ),
)
