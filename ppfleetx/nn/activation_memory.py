"""Simulation of the memory of a forward and a backward pass, from a list of operations (a tape). It computes
the memory kept between the passes, and the peak memory of each pass."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class Step:
    """One operation of a forward pass. All sizes are in bytes.

    Attributes:
        writes, size: name and size of the result.
        reads: names of the inputs that get a gradient.
        keeps: names of the tensors that the operation's backward pass needs.
        extra: memory kept for the backward pass in addition to named tensors, such as masks.
        scratch: temporary memory in the forward pass.
        backward_scratch: temporary memory in the backward pass, in addition to the gradients.
        gradients: size of the gradients of the operation's parameters.
        view: whether the result shares the memory of the first input.
        reuses: whether the input's gradient reuses the memory of the result's gradient.
        uses_no_parameters: whether the operation needs no parameters. Parameters that sharding stage 3 has
            fetched then do not count.
        inner: the steps that the backward pass recomputes; None: it recomputes nothing. If ``inner`` is set,
            the tensors in ``reads`` are kept, and ``keeps`` is ignored.
    """

    writes: str
    size: float
    reads: tuple[str, ...]
    keeps: tuple[str, ...] = ()
    extra: float = 0.0
    scratch: float = 0.0
    backward_scratch: float = 0.0
    gradients: float = 0.0
    view: bool = False
    reuses: bool = False
    uses_no_parameters: bool = False
    inner: Tape | None = None


@dataclass(frozen=True)
class Tape:
    """Operations in the order of the forward pass. The result of the last operation is the result of the
    tape.

    Attributes:
        inputs: sizes of the input tensors by name, in bytes.
        new_gradient_share: size of a new parameter gradient, divided by the size of the accumulated gradient
            to which it is added, for example 2 bytes / 4 bytes = 0.5. 0: new gradients are not counted.
    """

    inputs: dict[str, float]
    steps: tuple[Step, ...]
    new_gradient_share: float = 0.0

    @cached_property
    def _sizes(self) -> dict[str, float]:
        return {**self.inputs, **{step.writes: step.size for step in self.steps}}

    @cached_property
    def _roots(self) -> dict[str, str]:
        """Map from each tensor's name to the name of the tensor that owns its memory. For a view, this is
        another tensor; otherwise it is the tensor itself."""
        roots = {name: name for name in self.inputs}
        for step in self.steps:
            roots[step.writes] = roots[step.reads[0]] if step.view else step.writes
        return roots

    def _kept_by(self, step: Step) -> set[str]:
        names = step.reads if step.inner is not None else step.keeps
        return {self._roots[name] for name in names}

    @property
    def output(self) -> str:
        """Name of the tensor that owns the memory of the last operation's result."""
        return self._roots[self.steps[-1].writes]

    @cached_property
    def _held(self) -> set[str]:
        """Names of the tensors that are still in memory after the forward pass, except the inputs."""
        kept = {name for step in self.steps for name in self._kept_by(step)} | {self.output}
        return kept - self.inputs.keys()

    @cached_property
    def kept(self) -> float:
        """Bytes in use after the forward pass: the result, and the tensors kept for the backward pass."""
        extra = sum(step.extra for step in self.steps)
        return sum(self._sizes[name] for name in self._held) + extra

    def forward_peak(self, fetched_bytes: float = 0.0) -> float:
        """Return the peak memory of the forward pass in bytes, not counting the inputs.

        Args:
            fetched_bytes: bytes of the parameters that sharding stage 3 has fetched. They are added only
                while operations that use parameters run.
        """
        with_fetched, without = self._forward_peaks
        return max(with_fetched + fetched_bytes, without)

    @cached_property
    def _forward_peaks(self) -> tuple[float, float]:
        return self._forward(keeps=True)

    @cached_property
    def _forward_peak_without_graph(self) -> float:
        return max(self._forward(keeps=False))

    def _forward(self, *, keeps: bool) -> tuple[float, float]:
        """Return two memory peaks of the forward pass: the peak over the operations that use parameters, and
        the peak over all other operations.

        Args:
            keeps: whether tensors are kept for a backward pass.
        """
        last = {}  # name of the tensor that owns the memory -> number of the last step that reads it
        for number, step in enumerate(self.steps):
            for name in (*step.reads, *step.keeps):
                last[self._roots[name]] = number
        held = self._held if keeps else {self.output}
        alive, peaks = 0.0, [0.0, 0.0]
        for number, step in enumerate(self.steps):
            alive += 0.0 if step.view else step.size
            inside = step.inner._forward_peak_without_graph if step.inner is not None else 0.0
            here = alive + step.extra + max(step.scratch, inside - step.size)
            peaks[step.uses_no_parameters] = max(peaks[step.uses_no_parameters], here)
            alive += step.extra if keeps else 0.0
            gone = [name for name, end in last.items() if end == number]
            alive -= sum(self._sizes[n] for n in gone if n not in held and n not in self.inputs)
        return peaks[0], peaks[1]

    def backward_peak(self, *, first: bool, fetched_bytes: float = 0.0) -> float:
        """Return the peak memory of the backward pass in bytes.

        Args:
            first: whether this is the first micro batch, which allocates the parameter gradients.
            fetched_bytes: bytes of the parameters that sharding stage 3 has fetched. They are added only
                while operations that use parameters run.
        """
        with_fetched, without = self._backward_peaks[not first]
        return max(with_fetched + fetched_bytes, without)

    @cached_property
    def _backward_peaks(self) -> tuple[tuple[float, float], tuple[float, float]]:
        return self._backward(first=True), self._backward(first=False)

    def _backward(self, *, first: bool) -> tuple[float, float]:
        keepers: dict[str, int] = {}  # name of the tensor that owns the memory -> first step that keeps it
        for number, step in reversed(list(enumerate(self.steps))):
            for name in self._kept_by(step):
                keepers[name] = number
        held = keepers.keys() - self.inputs.keys()
        alive = sum(self._sizes[name] for name in held) + sum(step.extra for step in self.steps)
        gradients = {self.steps[-1].writes: self._sizes[self.steps[-1].writes]}
        alive += self._sizes[self.steps[-1].writes]
        peaks = [0.0, 0.0]
        peaks[self.steps[-1].uses_no_parameters] = alive
        for number, step in reversed(list(enumerate(self.steps))):
            upstream = gradients.pop(step.writes, 0.0)
            new = {} if step.reuses or step.view else {name: self._sizes[name] for name in step.reads}
            inside = 0.0
            if step.inner is not None:
                inner = step.inner
                # Recomputation also produces the step's result again, which is not used.
                backward = inner.backward_peak(first=first) + step.size - upstream
                inside = max(inner.forward_peak(), backward)
            moment = (
                sum(new.values()) + step.backward_scratch + step.gradients * (1 + self.new_gradient_share)
            )
            peaks[step.uses_no_parameters] = max(peaks[step.uses_no_parameters], alive + max(moment, inside))
            if not new:  # a view, or a gradient that reuses memory
                new = {step.reads[0]: upstream} if step.reads else {}
            for name, size in new.items():
                if name not in gradients:
                    gradients[name] = size
                    alive += size
            alive -= upstream
            alive -= step.extra
            alive += step.gradients if first else 0.0
            alive -= sum(self._sizes[name] for name in held if keepers[name] == number)
        return peaks[0], peaks[1]

    @cached_property
    def gradients(self) -> float:
        """Bytes of the gradients of all parameters that the tape's operations use."""
        return sum(step.gradients + (step.inner.gradients if step.inner else 0.0) for step in self.steps)
