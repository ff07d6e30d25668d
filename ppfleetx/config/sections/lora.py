"""Configuration section ``Model.lora``: low-rank adapters that are trained beside frozen weights."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Sequence
from fnmatch import translate
from functools import lru_cache

from ppfleetx.config.errors import RuleError
from ppfleetx.config.field_types import Fraction, PathText, PositiveFloat, Size, Text
from ppfleetx.config.section import Section

BLOCK_LINEARS = (
    *("attention.qkv", "attention.out_proj", "mlp.fc1", "mlp.fc2"),
    *("attention.q_down", "attention.q_up", "attention.kv_down", "attention.kv_up"),
    *("mlp.experts.fc1", "mlp.experts.fc2", "mlp.shared.fc1", "mlp.shared.fc2"),
)
"""The linears that a block can have, as canonical names without ``decoder.layers.{i}.``."""


class LoraConfig(Section):
    """Low-rank adapters (Hu et al., 2021): a linear layer's `x W` becomes `x W + alpha / rank * x A B`.

    A and B are trained, and so is a new classification head; everything else is frozen. A `[in, rank]` starts
    as N(0, 1 / in) and B `[rank, out]` as 0.
    """

    rank: Size = 8
    """Columns of A and rows of B."""
    alpha: PositiveFloat = 16.0
    """The output of adapters is multiplied by `alpha / rank`."""
    dropout: Fraction = 0.0
    """Dropout on the adapters' input."""
    targets: tuple[Text, ...] = tuple(f"*.{name}" for name in BLOCK_LINEARS)
    """Patterns (`*`, `?`, `[...]`) for the canonical names of the linears with an adapter, e.g.
    `decoder.layers.*.attention.qkv`. Each must match at least one linear of the blocks. By default, all
    linears of the blocks have an adapter. Each expert has its own adapter."""
    base: PathText | None = None
    """Checkpoint of the frozen weights, saved under any plan; it can be converted from Hugging Face or
    FleetX. Checkpoints of the run then hold only the trained weights and the fingerprint of this checkpoint.
    null: the frozen weights are loaded through `Engine.save_load` like the trained weights, and checkpoints
    hold all weights."""

    @property
    def scale(self) -> float:
        return self.alpha / self.rank

    def adapts(self, name: str) -> bool:
        """Whether the linear layer ``name``, such as ``decoder.layers.0.attention.qkv``, has an adapter."""
        return name.endswith(BLOCK_LINEARS) and _any_of(self.targets).match(name) is not None

    def unmatched_targets(self, names: Sequence[str]) -> Iterator[RuleError]:
        """Yield an error for each pattern in ``targets`` that matches no linear layer in ``names``.

        The default patterns are not checked. Keys in the errors are relative to section ``Model``.
        """
        # No model has all the layers that the default patterns name.
        if self.targets != LoraConfig.model_fields["targets"].default:
            yield from unmatched("lora.targets", self.targets, names)

    def violations(self) -> Iterator[RuleError]:
        if not self.targets:
            yield RuleError(("targets",), "names no linear; for none at all set Model.lora to null")


def unmatched(key: str, patterns: Sequence[str], names: Sequence[str]) -> Iterator[RuleError]:
    """Yield an error about ``key`` for each of its ``patterns`` that matches no linear layer in ``names``."""
    for pattern in patterns:
        if not any(map(_any_of((pattern,)).match, names)):
            ends = dict.fromkeys(name.split(".", 3)[-1] for name in names)
            near = difflib.get_close_matches(
                pattern, [*(f"*.{end}" for end in ends), *names], n=2, cutoff=0.0
            )
            rule = f"the pattern {pattern!r} fits no linear of the blocks; the nearest are {', '.join(near)}"
            yield RuleError((key,), rule)


@lru_cache
def _any_of(patterns: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(map(translate, patterns)))
