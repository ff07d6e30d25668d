"""An optimizer: groups of named parameters with an update rule for each group, and the states of the rules.
Nothing here depends on the parallel plan or on the learning-rate schedule."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import paddle
from paddle import Tensor, distributed

from ppfleetx.nn.param_spec import Shard, assign_owners
from ppfleetx.optims.gradients import drop_gradient, gradient_of
from ppfleetx.optims.rule import Group, ParamView, Rule, StateSpec

MASTER_WEIGHT = "master_weight"

NamedParams = Sequence[tuple[str, Tensor]]
StateKey = tuple[str, str]


@dataclass(frozen=True)
class UpdatePlace:
    """Settings of an optimizer: where and how states are stored and updated, and the process groups.

    Attributes:
        multi_precision: whether to keep float32 master weights of 16-bit parameters.
        on_host: whether to keep all states in host memory and update there.
        fused: whether rules can update many parameters in one kernel.
        group_of: function that returns this rank's process group along an axis. It returns None if the axis
            has only one rank.
    """

    multi_precision: bool = False
    on_host: bool = False
    fused: bool = False
    group_of: Callable[[str], Any] = lambda _: None


@dataclass(frozen=True)
class _Members:
    """Parameters that are updated together. If ``weight_decay`` is None, the optimizer's weight decay
    applies."""

    rule: Rule
    lr_factor: float
    weight_decay: float | None
    params: NamedParams


class Optimizer:
    """Updates parameters by the rules of their groups.

    Args:
        groups: each parameter belongs to the first group that accepts it.
        named_params: (canonical name, parameter) pairs; frozen parameters are ignored.
        decays: function of a canonical name that returns whether weight decay applies to the parameter.
        weight_decay: weight decay to use until :meth:`step` is called with another value.
        rate_factor: function of a canonical name that returns a factor of the parameter's learning rate. It
            is multiplied by the factor of the parameter's group.
    """

    def __init__(
        self,
        groups: Sequence[Group],
        named_params: NamedParams,
        decays: Callable[[str], bool],
        weight_decay: float,
        place: UpdatePlace,
        rate_factor: Callable[[str], float] = lambda _: 1.0,
    ) -> None:
        self.named_params = _trainable(named_params)
        self._all = [param for _, param in self.named_params]
        self._groups, self._place, self._decays = groups, place, decays
        self._rate_factor = rate_factor
        self._group_of = {name: _group(name, param, groups) for name, param in self.named_params}
        self._members = self._find_members()
        self._weight_decay = weight_decay
        self._states: dict[str, dict[str, Tensor]] = {}
        self._masters: dict[str, Tensor] = {}
        self._updated: Callable[[], None] = lambda: None
        for group in groups:
            group.rule.fused = place.fused and not place.on_host

    def keep_only(self, owned: Callable[[Tensor], bool], updated: Callable[[], None]) -> None:
        """Restrict updates and states to the parameters for which ``owned`` returns True (ZeRO sharding).
        From now on, :meth:`step` calls ``updated`` at its end."""
        self.named_params = [(name, param) for name, param in self.named_params if owned(param)]
        self._members = self._find_members()
        self._updated = updated

    def keep_masters(self, masters: Mapping[str, Tensor]) -> None:
        """Use the float32 tensors in ``masters``, by canonical name, as master weights of 16-bit parameters.
        Other master weights are copied from their parameters when they are first needed."""
        self._masters |= {name: masters[name] for name, _ in self.named_params if name in masters}

    @paddle.no_grad()
    def step(self, lr: float, weight_decay: float | None = None) -> None:
        """Update all parameters that have a gradient. If ``weight_decay`` is None, the last weight decay
        applies again."""
        if weight_decay is not None:
            self._weight_decay = float(weight_decay)
        for each in self._members:
            views = self._views(each.params)
            if views:
                decay = self._weight_decay if each.weight_decay is None else each.weight_decay
                self._update(each.rule, views, lr * each.lr_factor, decay)
        self._updated()

    def clear_grad(self) -> None:
        """Drop the gradients of all parameters, including parameters that other ranks update."""
        for param in self._all:
            drop_gradient(param)

    def state(self) -> dict[StateKey, Tensor]:
        """Return the optimizer's state tensors, including master weights, by (canonical parameter name, state
        name). States that do not exist yet are created."""
        for group in self._groups:
            group.rule.forget()
        state: dict[StateKey, Tensor] = {}
        for name, param in self.named_params:
            state |= {(name, key): tensor for key, tensor in self._states_of(name, param).items()}
            master = self._master_of(name, param)
            if master is not None:
                state[name, MASTER_WEIGHT] = master
        return state

    def _find_members(self) -> list[_Members]:
        found: dict[tuple[int, float, float | None], NamedParams] = {}
        for number, group in enumerate(self._groups):
            for name, param in self.named_params:
                if self._group_of[name] is group:
                    decay = group.weight_decay
                    if decay is None and not self._decays(name):
                        decay = 0.0
                    factor = group.lr_factor * self._rate_factor(name)
                    found.setdefault((number, factor, decay), []).append((name, param))
        return [
            _Members(self._groups[number].rule, factor, decay, params)
            for (number, factor, decay), params in found.items()
        ]

    def _views(self, members: NamedParams) -> list[ParamView]:
        views = []
        for name, param in members:
            gradient = gradient_of(param)
            if gradient is not None:
                master = self._master_of(name, param)
                value, rounded = (param, None) if master is None else (master, param)
                spec, states = getattr(param, "spec", None), self._states_of(name, param)
                if _is_16_bit(gradient):
                    gradient = gradient.astype("float32")
                views.append(ParamView(name, spec, value, gradient, states, rounded))
        return views

    def _update(self, rule: Rule, views: list[ParamView], lr: float, weight_decay: float) -> None:
        if self._place.on_host:
            for view in views:
                update_on_host(rule, view, lr=lr, weight_decay=weight_decay)
            return
        if rule.needs_whole:
            update_whole(rule, views, self._place.group_of, lr=lr, weight_decay=weight_decay)
        else:
            rule.update(views, lr=lr, weight_decay=weight_decay)
        for view in views:
            if view.rounded is not None and not rule.rounds:
                paddle.assign(view.value.astype(view.rounded.dtype), view.rounded)

    def _states_of(self, name: str, param: Tensor) -> dict[str, Tensor]:
        if name not in self._states:
            specs = self._group_of[name].rule.states
            self._states[name] = {spec.name: self._new_state(spec, param) for spec in specs}
        return self._states[name]

    def _new_state(self, spec: StateSpec, param: Tensor) -> Tensor:
        dtype = "float32" if _is_16_bit(param) else param.dtype
        with made_on_host() if spec.is_number or self._place.on_host else nullcontext():
            return paddle.full([1] if spec.is_number else param.shape, spec.start, dtype)

    def _master_of(self, name: str, param: Tensor) -> Tensor | None:
        if name not in self._masters and self._place.multi_precision and _is_16_bit(param):
            master = param.detach().astype("float32")
            self._masters[name] = copy_to_host(master) if self._place.on_host else master
        return self._masters.get(name)


def _group(name: str, param: Tensor, groups: Sequence[Group]) -> Group:
    if len(groups) == 1:
        return groups[0]
    found = next((group for group in groups if group.takes(param.spec)), None)
    if found is None:
        raise ValueError(
            f"no group of the optimizer accepts {name}; make the last group accept all parameters"
        )
    return found


def _is_16_bit(param: Tensor) -> bool:
    return param.dtype in (paddle.float16, paddle.bfloat16)


def _trainable(named_params: Iterable[tuple[str, Tensor]]) -> list[tuple[str, Tensor]]:
    """Return the trainable parameters. A tied parameter that is listed twice appears once."""
    unique = {id(param): (name, param) for name, param in reversed(list(named_params))}
    return [pair for pair in reversed(list(unique.values())) if not pair[1].stop_gradient]


# -- offload: parameters on a device are updated on the CPU, with states in host memory


def copy_to_host(tensor: Tensor) -> Tensor:
    """Copy a tensor to host memory, even if it is there already (unlike ``Tensor.cpu``)."""
    return tensor.detach()._copy_to(paddle.CPUPlace(), True)


@contextmanager
def made_on_host() -> Iterator[None]:
    device = paddle.get_device()
    paddle.set_device("cpu")
    try:
        yield
    finally:
        paddle.set_device(device)


def update_on_host(rule: Rule, view: ParamView, *, lr: float, weight_decay: float) -> None:
    """Update one parameter in host memory, and copy the result to the device."""
    with made_on_host():
        value = copy_to_host(view.value) if view.rounded is None else view.value
        here = replace(view, value=value, gradient=copy_to_host(view.gradient), rounded=None)
        rule.update([here], lr=lr, weight_decay=weight_decay)
    parameter = view.value if view.rounded is None else view.rounded
    # Round on the host, so that only 16 bits are transferred. copy_ keeps the parameter's device and memory.
    parameter.copy_(value.astype(parameter.dtype), True)


# -- updates that need whole matrices, for parameters sliced over tensor-parallel ranks


def update_whole(
    rule: Rule, views: Sequence[ParamView], group_of: Callable[[str], Any], *, lr: float, weight_decay: float
) -> None:
    """Apply ``rule.update`` to whole matrices, for a rule that is not elementwise. Tensor-parallel ranks that
    share a matrix gather it; one of them updates it, and all keep their slices of the result. All these ranks
    must call this."""
    alone: list[ParamView] = []
    shared: dict[str, list[ParamView]] = {}
    for view in views:
        axis = None if view.spec is None else view.spec.view.tensor
        if axis is None or group_of(axis) is None:
            alone.append(view)
        else:
            shared.setdefault(axis, []).append(view)
    if alone:
        rule.update(alone, lr=lr, weight_decay=weight_decay)
    for axis, members in shared.items():
        group = group_of(axis)
        owners = assign_owners({view.name: view.value.size for view in members}, group.nranks)
        for view in members:
            placement, source = view.spec.placement(axis), group.ranks[owners[view.name]]
            dim = placement.dim if isinstance(placement, Shard) else None
            # The rank assigned to the matrix updates it and broadcasts the result.
            whole = _gathered(view, dim, group)
            if source == group.ranks[group.rank]:
                rule.update([whole], lr=lr, weight_decay=weight_decay)
            for mine, all_of_it in zip(_changing(view), _changing(whole), strict=True):
                distributed.broadcast(all_of_it, source, group=group)
                part = all_of_it if dim is None else all_of_it.split(group.nranks, axis=dim)[group.rank]
                paddle.assign(part, mine)


def _changing(view: ParamView) -> list[Tensor]:
    return [view.value, *view.states.values()]


def _gathered(view: ParamView, dim: int | None, group: Any) -> ParamView:
    def whole(tensor: Tensor) -> Tensor:
        if dim is None:
            return tensor.detach().clone()
        parts: list[Tensor] = []
        distributed.all_gather(parts, tensor.detach().contiguous(), group=group)
        return paddle.concat(parts, axis=dim)

    states = {name: whole(state) for name, state in view.states.items()}
    return ParamView(view.name, view.spec, whole(view.value), whole(view.gradient), states)
