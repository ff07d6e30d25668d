"""Create the callbacks that ``Engine.callbacks`` names, and save and restore their states."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence, Set
from typing import Any

from ppfleetx.config.errors import CheckpointError, ConfigError, shown
from ppfleetx.config.registries import CALLBACKS, LOGGERS
from ppfleetx.config.sections.engine import CallbackConfig
from ppfleetx.core.engine.callbacks.base import Callback, CallbackSetup
from ppfleetx.core.engine.callbacks.metrics import LogWriters, check_options
from ppfleetx.distributed.context import ParallelContext
from ppfleetx.distributed.coordination import joint_errors
from ppfleetx.utils.log import get_logger

_KEY = "Engine.callbacks"


class CallbackList:
    """The callbacks that run on this rank, in the order of ``Engine.callbacks``. ``named`` has (name,
    callback) pairs. Checkpoints store the state of each callback under its name."""

    def __init__(self, named: Sequence[tuple[str, Callback]] = ()) -> None:
        self.named = list(named)

    def __iter__(self) -> Iterator[Callback]:
        return (callback for _, callback in self.named)

    def state(self) -> dict[str, Any]:
        """Return the non-empty states of the callbacks, by name. Raises CheckpointError if a state has
        values that JSON cannot represent, such as NaN."""
        states = {}
        for name, callback in self.named:
            try:  # a copy, because a background save writes it later
                states[name] = json.loads(json.dumps(callback.state(), allow_nan=False))
            except (TypeError, ValueError) as error:
                raise CheckpointError(
                    f"the state of the callback {name} cannot be saved: {error}; state() gives a mapping of "
                    "finite numbers, texts, lists and mappings"
                ) from error
        return {name: state for name, state in states.items() if state}

    def load_state(self, states: Any) -> None:
        """Restore the callbacks from ``states``, the states by name in a checkpoint. Callbacks without a
        saved state do not change. Raises CheckpointError if ``states`` is not a mapping."""
        if not isinstance(states, Mapping):
            raise CheckpointError(f"the callbacks' states in the checkpoint are damaged: {shown(states)}")
        for name, callback in self.named:
            if name in states:
                callback.load_state(states[name])


def check_callbacks(items: Sequence[CallbackConfig]) -> None:
    """Check the names and options of callbacks without creating them. Raises ConfigError for an unknown
    name or wrong options."""
    for _, item in _numbered(items):
        target = CALLBACKS.target(item.name)
        # Built-in callbacks without options are not imported here, because they import Paddle.
        if item.options or not isinstance(target, str):
            check_options(CALLBACKS.load(item.name), item, _KEY)


def build_callbacks(setup: CallbackSetup) -> CallbackList:
    """Create the callbacks of ``Engine.callbacks`` that run on this rank and, on rank 0, also those of
    ``Engine.loggers``. All ranks must call this.

    Raises:
        UserError: on all ranks, if a callback cannot be created on any rank. If all ranks fail with the same
            message, the error is their ConfigError; otherwise it is a JointError.
    """
    named: list[tuple[str, Callback]] = []
    with joint_errors(setup.ctx):
        for name, item in _numbered(setup.cfg.Engine.callbacks):
            make = CALLBACKS.load(item.name)
            check_options(make, item, _KEY)
            if _is_here(item.name, setup.ctx):
                callback = make(setup, **item.options)
                if callback is not None:
                    named.append((name, _checked(callback, item.name)))
        if setup.ctx.is_main:
            named += _loggers(setup, {name for name, _ in named})
    return CallbackList(named)


def _loggers(setup: CallbackSetup, there: Set[str]) -> Iterator[tuple[str, Callback]]:
    for item in setup.cfg.Engine.loggers:
        name = LOGGERS.traits(item.name).callback
        if name is not None and name not in there:
            callback = CALLBACKS.load(name)(setup)
            if callback is not None:
                yield name, callback
    writers = LogWriters.of(setup)
    if writers is not None:
        yield "loggers", writers


def _checked(callback: Any, name: str) -> Callback:
    if isinstance(callback, Callback):
        hooks = [name for name in vars(Callback) if name.startswith("on_")]
        strange = [name for name in dir(type(callback)) if name.startswith("on_") and name not in hooks]
        if strange:
            get_logger().warning(
                f"callback {name}: nothing calls {', '.join(strange)}; the hooks are {', '.join(hooks)}"
            )
        return callback
    raise ConfigError(
        f"must be a Callback or None; it is {shown(callback)}, of type {type(callback).__name__}",
        key=_KEY,
        value=name,
    )


def _numbered(items: Sequence[CallbackConfig]) -> Iterator[tuple[str, CallbackConfig]]:
    """Yield (name, entry) for each callback in ``items``, the entries of ``Engine.callbacks``. An entry
    that stands for several callbacks is split into one entry per callback. Names are unique: a second
    ``csv`` callback is named ``csv#2``. Raises ConfigError if two entries are equal."""
    seen: dict[str, list[CallbackConfig]] = {}
    for item in _without_groups(items):
        before = seen.setdefault(item.name, [])
        if item in before:
            raise ConfigError("names a callback twice with the same options", key=_KEY, value=item.name)
        before.append(item)
        number = f"#{len(before)}" if len(before) > 1 else ""
        yield item.name + number, item


def _without_groups(items: Sequence[CallbackConfig]) -> Iterator[CallbackConfig]:
    for item in items:
        target = CALLBACKS.target(item.name)
        if isinstance(target, tuple):
            if item.options:
                raise ConfigError(
                    "stands for several callbacks and takes no options", key=_KEY, value=item.name
                )
            yield from (CallbackConfig(name=name) for name in target)
        else:
            yield item


def _is_here(name: str, ctx: ParallelContext) -> bool:
    ranks = CALLBACKS.traits(name).ranks
    return ctx.is_main or ranks == "all" or (ranks == "loss" and ctx.reports_loss)
