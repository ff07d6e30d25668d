"""The memory and time of a configuration's own run, in a line or two: for ``--check`` and for runs."""

from __future__ import annotations

import re

from ppfleetx.config.counts import counted
from ppfleetx.config.sections.root import RunConfig
from ppfleetx.planner.cards import GIB, Card, card_names, load_card
from ppfleetx.planner.case import case_of
from ppfleetx.planner.network import Cluster
from ppfleetx.planner.prediction import Prediction
from ppfleetx.utils.devices import CPU, GPU, XPU

ANY_GPU, ANY_CPU = "A100-80GB", "CPU"
"""Cards that stand for the devices when no card is named."""


def run_prediction(
    cfg: RunConfig, device: str, card: Card | None = None, *, device_name: str = ""
) -> Prediction | None:
    """The prediction for the run of ``cfg`` under its own plan.

    Args:
        cfg: the configuration.
        device: ``cpu`` or anything else.
        card: the card of the run; None: ``Global.card``, else that of ``device_name``, else a typical one.
        device_name: the driver's name of the device.

    Returns:
        None if the run does not train our own GPT, or the card does not compute in its type.

    Raises:
        ConfigError: ``Global.card`` is no card.
    """
    prediction = _prediction(cfg, device, card, device_name)
    if prediction is None or prediction.case.precision.compute not in prediction.cluster.card.peak_tflops:
        return None
    return prediction


def _prediction(
    cfg: RunConfig, device: str, card: Card | None = None, device_name: str = ""
) -> Prediction | None:
    """As :func:`run_prediction`, also for cards without a speed in this type: enough for memory."""
    if cfg.Data.Train is None or cfg.Model.name != "GPT":
        return None
    if card is None:
        name = cfg.Global.card or card_of_device(device_name)
        asked_in = cfg.origins.get("Global.card")
        card = any_card(device) if name is None else load_card(name, key="Global.card", asked_in=asked_in)
    return Prediction(case_of(cfg, card), Cluster(card))


def any_card(device: str) -> Card:
    """The card that stands for devices of a kind when no card is named."""
    kind = device.partition(":")[0]
    if kind in (CPU, GPU, XPU):
        return load_card(ANY_CPU if kind == CPU else ANY_GPU)
    return load_card(ANY_GPU).model_copy(update={"name": kind, "kernels": "plugin"})


def memory_lines(cfg: RunConfig, device: str) -> list[str]:
    """Memory of the fullest device, and whether it fits the card that ``Global.card`` names."""
    prediction = _prediction(cfg, device)
    if prediction is None:
        return []
    stages, card = prediction.memory, prediction.cluster.card
    fullest = max(range(len(stages)), key=lambda number: stages[number].peak)
    worst = stages[fullest]
    where = f" on the fullest of {counted(len(stages), 'stage')} (stage {fullest})" if len(stages) > 1 else ""
    states = worst.parameters + worst.gradients + worst.masters + worst.optimizer
    passing = worst.activations + worst.logits + worst.temporary + worst.buffers
    lines = [
        f"about {_gib(worst.total)} a device{where}: parameters, gradients and states {_gib(states)}, "
        f"activations and temporaries {_gib(passing)}, driver and fragments "
        f"{_gib(worst.context + worst.fragments)}"
    ]
    if worst.host:
        lines.append(f"and {_gib(worst.host)} of host memory a process (states, or a copy while saving)")
    if worst.start > worst.total:
        lines.append(f"and {_gib(worst.start)} while the model is made, before the first step")
    if cfg.Global.card is not None:
        lines.append(verdict(worst.peak, card.memory_gib * GIB, card.name))
    elif card.kernels != "cpu":
        attention = "flash" if prediction.case.flash else "the reference"
        lines.append(f"counted with {attention} attention; Global.card says what it has to fit into")
    return lines


def card_of_device(device_name: str) -> str | None:
    """The shipped card whose model is a word of a driver's name: ``NVIDIA A100-SXM4-80GB`` is an A100.

    PCIe models of the same name are slower; set `Global.peak_tflops` for them.
    """
    words = re.split(r"[\s_-]+", device_name.upper())
    return next((name for name in card_names() if name.split("-")[0] in words and name != ANY_CPU), None)


def verdict(needed: float, there: float, card: str) -> str:
    """A sentence: whether ``needed`` bytes fit into the ``there`` bytes of the card."""
    if needed <= there:
        return f"it fits {card}, of which {_gib(there)} can be used"
    return (
        f"it does NOT fit {card}, of which {_gib(there)} can be used: a smaller Global.micro_batch_size, "
        "Model.use_recompute or more devices make it smaller (ppfleetx plan ranks what fits)"
    )


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / GIB:.1f} GiB" if num_bytes >= GIB / 10 else f"{num_bytes / 2**20:.1f} MiB"
