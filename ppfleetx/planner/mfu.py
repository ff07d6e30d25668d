"""FLOPs of a training step, and the share of the devices' peak that a run reaches (MFU)."""

from __future__ import annotations

from dataclasses import dataclass

from ppfleetx.config.sections.root import RunConfig
from ppfleetx.models.gpt.spec import flops_per_step, matrix_size
from ppfleetx.planner.cards import Card, any_card, card_of_run
from ppfleetx.planner.job import Job, job_of


@dataclass(frozen=True)
class StepFlops:
    """FLOPs of one training step on all devices together. A multiply-add counts as two.

    The formulas hold for a plain GPT with l layers, hidden size h and vocabulary size V, and for B sequences
    of length s (Narayanan et al. 2021, Korthikanti et al. 2022).

    Attributes:
        causal: model FLOPs with only the causal half of attention, as in Megatron-LM since 2024.
        full: model FLOPs with all pairs of positions in attention: 72 B s l h^2 (1 + s / 6h + V / 12lh).
        hardware: ``full`` plus recomputation: 96 B s l h^2 (1 + s / 6h + V / 16lh) with full recompute.
    """

    causal: int
    full: int
    hardware: int


def step_flops(job: Job) -> StepFlops:
    batch, tokens = job.global_batch, job.global_batch * job.seq_len
    causal = flops_per_step(job.model, batch, job.seq_len)
    full = hardware = causal
    for block, recompute in job.layers:
        core = 2 * tokens * job.seq_len * block.attention.score_macs_per_pair  # of a forward pass, all pairs
        again = {
            "none": 0,
            "core_attn": core,
            "full_attn": core + 2 * tokens * matrix_size(block.attention),
            "full": core + 2 * tokens * matrix_size(block),
        }
        full += core * 3 // 2
        hardware += core * 3 // 2 + again[recompute]
    return StepFlops(causal, full, hardware)


def tflops_per_device(flops: float, seconds: float, job: Job) -> float:
    return flops / seconds / job.plan.world_size / 1e12


def model_flops_utilization(job: Job, seconds: float, card: Card) -> float:
    """Return the MFU from 0 to 1 (Chowdhery et al. 2022, §4.1) of a step that takes ``seconds``.

    All pairs of positions count in attention, not only the causal half.
    """
    return tflops_per_device(step_flops(job).full, seconds, job) * 1e12 / card.peak(job.precision.compute)


@dataclass(frozen=True)
class Utilization:
    """Computes TFLOP/s and MFU of a run from the time of a step.

    Attributes:
        flops: FLOPs of a step.
        peak: peak FLOP/s of one device; None if unknown.
        peak_of: the source of ``peak``: a configuration key, or a card and a data type.
    """

    job: Job
    flops: StepFlops
    peak: float | None
    peak_of: str

    def rates(self, seconds: float) -> dict[str, float]:
        """Return TFLOP/s per device and MFU (from 0 to 1) of a step that takes ``seconds``, by metric name.

        There are three values of each: with full attention, with causal attention, and with full attention
        and recomputation. The result has no MFU if the peak is unknown.
        """
        kinds = (
            ("", "mfu", "full"),
            ("_causal", "mfu_causal", "causal"),
            ("_with_recompute", "hfu", "hardware"),
        )
        tflops = {
            name: tflops_per_device(getattr(self.flops, kind), seconds, self.job) for name, _, kind in kinds
        }
        found = {f"tflops_per_device{name}": value for name, value in tflops.items()}
        if self.peak is not None:
            found |= {share: tflops[name] * 1e12 / self.peak for name, share, _ in kinds}
        return found

    def describe(self) -> str:
        """Return one line for the log, with the FLOPs of a step and the peak of a device."""
        flops = self.flops
        again = "" if flops.hardware == flops.full else f", {flops.hardware:.4e} with recomputation"
        peak = (
            "the peak of a device is not known (set Global.card or Global.peak_tflops)"
            if self.peak is None
            else f"peak of a device {self.peak / 1e12:g} TFLOP/s ({self.peak_of})"
        )
        return (
            f"compute: {flops.full:.4e} FLOPs a step with full attention, {flops.causal:.4e} with its causal "
            f"half{again}; {peak}"
        )


def run_utilization(cfg: RunConfig, device: str, device_name: str = "") -> Utilization | None:
    """Count the FLOPs of a step of the configured run, and look up the peak FLOP/s of its devices.

    Returns None unless the run trains the built-in GPT on a corpus, without a classifier or LoRA adapters.

    Args:
        device: the kind of device, such as ``gpu``.
        device_name: the driver's name of the device, such as ``NVIDIA A100-SXM4-80GB``; "" if unknown.
    """
    train = cfg.Data.Train
    if train is None or not train.dataset.is_corpus or cfg.Model.name != "GPT" or cfg.Model.lora is not None:
        return None
    if cfg.Model.task.classifies:
        return None
    job = job_of(cfg, any_card(device))
    return Utilization(job, step_flops(job), *_peak(cfg, job, device_name))


def _peak(cfg: RunConfig, job: Job, device_name: str) -> tuple[float | None, str]:
    if cfg.Global.peak_tflops is not None:
        return cfg.Global.peak_tflops * 1e12, "Global.peak_tflops"
    card = card_of_run(cfg, device_name)
    if card is None:
        return None, ""
    dtype = job.precision.compute
    if dtype == "float32" and cfg.Global.allow_tf32 and "tf32" in card.peak_tflops:
        dtype = "tf32"
    return (card.peak(dtype), f"{card.name}, {dtype}") if dtype in card.peak_tflops else (None, "")
