"""Accelerator cards: their constants of speed and memory (``cards.yaml``), and the times of operations."""

from __future__ import annotations

import difflib
import re
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from ppfleetx.config.errors import ConfigError
from ppfleetx.config.field_types import NonNegativeFloat, PositiveFloat, PositiveInt, Text, UnitFloat
from ppfleetx.config.reading.parse import read_yaml
from ppfleetx.config.reading.tree import Node
from ppfleetx.config.section import Section
from ppfleetx.config.sections.root import RunConfig
from ppfleetx.config.validate import section_of
from ppfleetx.planner import ANY_CARD, shipped_cards
from ppfleetx.utils.device_support import CPU, GPU, XPU

GIB = 1 << 30
_ANY_CPU = "CPU"
_MICRO = 1e-6


class Card(Section):
    """The constants of speed and memory of one kind of accelerator card, or of a CPU."""

    name: Text
    """The name of the card on the command line."""
    kernels: Literal["cpu", "gpu", "plugin"] = "gpu"
    """Implementation of the operations: `cpu`; `gpu`, also for other cards with kernels in Paddle itself; or
    `plugin`, for the device of a Paddle plugin.
    """
    memory_gib: PositiveFloat
    """Memory available to a program, in GiB."""
    peak_tflops: dict[Text, PositiveFloat]
    """The vendor's peak speed of dense matmuls by data type, in TFLOP/s."""
    matmul_efficiency: UnitFloat
    """Share of the peak that a large matmul reaches."""
    matmul_latency_us: NonNegativeFloat
    """Fixed time of a matmul in addition to its arithmetic, in microseconds."""
    matmul_half_dim: NonNegativeFloat = 0.0
    """Size of the smallest dimension (rows, columns or inner) at which a matmul reaches half of
    `matmul_efficiency`."""
    memory_gb_s: PositiveFloat
    """The vendor's memory bandwidth, in GB/s."""
    memory_efficiency: UnitFloat
    """Share of the memory bandwidth that element-wise operations reach."""
    kernel_latency_us: NonNegativeFloat
    """Fixed time of an element-wise operation in addition to its memory traffic, in microseconds."""
    flash_efficiency: NonNegativeFloat
    """Share of the peak that fused attention reaches; 0 if it cannot run."""
    link_gb_s: dict[PositiveInt, PositiveFloat]
    """Bus bandwidth of a large all-reduce within a node by number of cards, in GB/s."""
    link_latency_us: NonNegativeFloat
    """Minimum time of an all-reduce within a node, in microseconds."""
    context_gib: NonNegativeFloat
    """Memory that driver and libraries use before the first tensor is allocated, in GiB."""
    network_gbps: PositiveFloat
    """Network bandwidth of a node in one direction, over all its interfaces together, in Gbit/s."""
    network_efficiency: UnitFloat
    """Share of the network's speed that a message between two ranks reaches."""
    collective_loss: NonNegativeFloat
    """Share of a collective's time that each doubling of the nodes adds."""
    jitter: NonNegativeFloat
    """Standard deviation of the nodes' step times, as a share of the step time."""
    network_latency_us: NonNegativeFloat
    """Fixed time of a message between nodes in addition to its transfer, in microseconds."""
    sources: tuple[Text, ...] = Field(default=())
    """Sources of the numbers."""

    def __hash__(self) -> int:
        return hash(self.name)  # the dictionary fields are not hashable

    def peak(self, dtype: str) -> float:
        """Return the peak FLOP/s of dense matmuls of type ``dtype``.

        Raises:
            ConfigError: the card has no peak for this type.
        """
        if dtype not in self.peak_tflops:
            raise ConfigError(
                f"{self.name} has no {dtype} matrix products (it has {', '.join(self.peak_tflops)})",
                key="Engine.mix_precision.dtype",
                value=dtype,
            )
        return self.peak_tflops[dtype] * 1e12

    def matmul_seconds(self, flops: float, dtype: str, narrowest: float = 0.0, kernels: int = 1) -> float:
        """Return the time of ``kernels`` matmuls with ``flops`` floating-point operations in total.

        Args:
            narrowest: the smallest dimension of each matmul. A narrow matmul is slower; 0 ignores this.
        """
        share = narrowest / (narrowest + self.matmul_half_dim) if narrowest else 1.0
        speed = self.peak(dtype) * self.matmul_efficiency * share
        return flops / speed + kernels * self.matmul_latency_us * _MICRO

    def memory_seconds(self, num_bytes: float, kernels: float = 1) -> float:
        """Return the time of ``kernels`` element-wise operations that move ``num_bytes`` in total."""
        speed = self.memory_gb_s * 1e9 * self.memory_efficiency
        return num_bytes / speed + kernels * self.kernel_latency_us * _MICRO

    def link_bandwidth(self, num_cards: int) -> float:
        """Return the bus bandwidth, in bytes/s, of a collective among ``num_cards`` cards of one node."""
        sizes = sorted(self.link_gb_s)
        at_least = next((size for size in sizes if size >= num_cards), sizes[-1])
        return self.link_gb_s[at_least] * 1e9


def load_card(name: str, *, key: str = "--card", asked_in: str | None = None) -> Card:
    """Load the description of an accelerator card.

    Args:
        name: a card in ``cards.yaml``, or a YAML file that describes exactly one card, under its name or, as
            the whole file, without one.
        key, asked_in: for error messages: the option or configuration key whose value is ``name``, and the
            place where it was set.

    Raises:
        ConfigError: there is no such card or file, or the file does not describe one card.
    """
    shipped = shipped_cards()
    if name in shipped:
        return _card(name, shipped, "the shipped cards")
    if not name.endswith((".yaml", ".yml")):
        begins = [card for card in shipped if card.lower().startswith(name.lower())]
        near = begins or difflib.get_close_matches(name, shipped, n=1, cutoff=0.4)
        hint = (
            f"did you mean {' or '.join(near)}?"
            if near
            else f"there are {', '.join(shipped)}, or give a YAML file"
        )
        raise ConfigError("there is no such card;", key=key, value=name, place=asked_in, hint=hint)
    own = _plain(read_yaml(Path(name), key=key, value=name, place=asked_in))
    if isinstance(own.get("base"), str) or own.keys() & Card.model_fields.keys():
        own = {Path(name).stem: own}  # the numbers of a card without its name
    if len(own) != 1:
        raise ConfigError(
            f"the file describes {len(own)} cards; give one", key=key, value=name, place=asked_in
        )
    return _card(next(iter(own)), {**shipped, **own}, name)


def any_card(device: str) -> Card:
    """Return the default card for a device such as ``cpu`` or ``gpu:0``."""
    kind = device.partition(":")[0]
    if kind in (CPU, GPU, XPU):
        return load_card(_ANY_CPU if kind == CPU else ANY_CARD)
    return load_card(ANY_CARD).model_copy(update={"name": kind, "kernels": "plugin"})


def card_of_device(device_name: str) -> str | None:
    """Return the name of the card in ``cards.yaml`` for a device such as ``NVIDIA A100-SXM4-80GB``; None if
    no card has the device's model (``A100``).

    If several cards have this model, the one with the device's memory size (``80GB``) is returned, or else
    the first. The form factor (``SXM4``) is ignored. Users can name another card in `Global.card`, or correct
    the peak with `Global.peak_tflops`.
    """
    words = re.split(r"[\s_-]+", device_name.upper())
    of_model = [name for name in shipped_cards() if name.split("-")[0] in words and name != _ANY_CPU]
    return max(of_model, key=lambda name: name.split("-")[-1] in words, default=None)


def card_of_run(cfg: RunConfig, device_name: str) -> Card | None:
    """Return the card that ``Global.card`` names. If it is unset, return the card of the device
    ``device_name`` (:func:`card_of_device`), or None if there is none.

    Raises:
        ConfigError: there is no card with the name in ``Global.card``.
    """
    name = cfg.Global.card or card_of_device(device_name)
    asked_in = cfg.origins.get("Global.card")
    return None if name is None else load_card(name, key="Global.card", asked_in=asked_in)


def _card(name: str, described: dict[str, Any], place: str) -> Card:
    values = described[name]
    if not isinstance(values, dict):
        raise ConfigError("a card is a mapping of its numbers", key=name, place=place)
    values = dict(values)
    base = values.pop("base", None)
    if base is not None:
        if base == name or base not in described or "base" in described[base]:
            raise ConfigError(
                "must be a card that is described in full", key=f"{name}.base", value=base, place=place
            )
        values = {**described[base], **values}
    try:
        return section_of(Card, {"name": name, **values})
    except ConfigError as error:
        raise ConfigError(str(error), key=name, place=place) from None


def _plain(node: Node) -> Any:
    if isinstance(node.value, dict):
        return {_number(key): _plain(child) for key, child in node.value.items()}
    if isinstance(node.value, list):
        return [_plain(child) for child in node.value]
    return node.value


def _number(key: str) -> str | int:
    return int(key) if key.isascii() and key.isdigit() else key
