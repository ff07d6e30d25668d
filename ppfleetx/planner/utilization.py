"""What part of a device's arithmetic a run uses, from the time of its steps."""

from __future__ import annotations

from dataclasses import dataclass

from ppfleetx.config.sections.root import RunConfig
from ppfleetx.planner.cards import load_card
from ppfleetx.planner.case import Case, case_of
from ppfleetx.planner.flops import StepFlops, step_flops, tflops_per_device
from ppfleetx.planner.summary import any_card, card_of_device


@dataclass(frozen=True)
class Utilization:
    """Rates of a run's steps.

    Attributes:
        case: the run.
        flops: of a step, in each convention.
        peak: FLOP/s of one device; None: not known.
        peak_of: where the peak is from, for people.
    """

    case: Case
    flops: StepFlops
    peak: float | None
    peak_of: str

    def rates(self, seconds: float) -> dict[str, float]:
        """TFLOP/s of each device and shares of the peak (0 to 1) of a step that took ``seconds``.

        ``tflops_per_device`` and ``mfu`` count all pairs of positions in attention, as in Narayanan et al.
        (2021) and Chowdhery et al. (2022); those with ``_causal`` the causal half, as Megatron-LM does;
        ``tflops_per_device_with_recompute`` and ``hfu`` what is computed a second time as well.
        """
        kinds = (
            ("", "mfu", "full"),
            ("_causal", "mfu_causal", "causal"),
            ("_with_recompute", "hfu", "hardware"),
        )
        tflops = {
            name: tflops_per_device(getattr(self.flops, kind), seconds, self.case) for name, _, kind in kinds
        }
        found = {f"tflops_per_device{name}": value for name, value in tflops.items()}
        if self.peak is not None:
            found |= {share: tflops[name] * 1e12 / self.peak for name, share, _ in kinds}
        return found

    def describe(self) -> str:
        """The counts and the peak, for the start of a log."""
        flops = self.flops
        again = "" if flops.hardware == flops.full else f", {flops.hardware:.4e} with recomputation"
        peak = (
            "the peak of a device is not known (Global.card or Global.peak_tflops tells it)"
            if self.peak is None
            else f"peak of a device {self.peak / 1e12:g} TFLOP/s ({self.peak_of})"
        )
        return (
            f"compute: {flops.full:.4e} FLOPs a step with full attention, {flops.causal:.4e} with its causal "
            f"half{again}; {peak}"
        )


def run_utilization(cfg: RunConfig, device: str, device_name: str = "") -> Utilization | None:
    """What is needed to compute TFLOP/s and MFU of the run of ``cfg``.

    Args:
        cfg: the configuration.
        device: ``cpu`` or anything else.
        device_name: what the driver calls the device.

    Returns:
        None where a step's operations are not known: another network than our GPT, a classifier, frozen
        weights beside adapters, and sequences of texts, which are as long as they are.
    """
    train = cfg.Data.Train
    if train is None or not train.dataset.is_corpus or cfg.Model.name != "GPT" or cfg.Model.lora is not None:
        return None
    if cfg.Model.task.classifies:
        return None
    case = case_of(cfg, any_card(device))
    return Utilization(case, step_flops(case), *_peak(cfg, case, device_name))


def _peak(cfg: RunConfig, case: Case, device_name: str) -> tuple[float | None, str]:
    """FLOP/s of one device in the run's type, and who says so."""
    if cfg.Global.peak_tflops is not None:
        return cfg.Global.peak_tflops * 1e12, "Global.peak_tflops"
    name = cfg.Global.card or card_of_device(device_name)
    if name is None:
        return None, ""
    card = load_card(name, key="Global.card", asked_in=cfg.origins.get("Global.card"))
    dtype = case.precision.compute
    if dtype == "float32" and cfg.Global.allow_tf32 and "tf32" in card.peak_tflops:
        dtype = "tf32"
    return (card.peak(dtype), f"{card.name}, {dtype}") if dtype in card.peak_tflops else (None, "")
