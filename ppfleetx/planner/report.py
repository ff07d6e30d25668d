"""Format the planner's predictions as text."""

from __future__ import annotations

from ppfleetx.config.message_text import bytes_text, counted
from ppfleetx.config.sections.model import ModelConfig
from ppfleetx.config.sections.root import RunConfig
from ppfleetx.models.gpt.spec import active_count, parameter_count
from ppfleetx.planner.cards import GIB
from ppfleetx.planner.communication import Cluster
from ppfleetx.planner.job import EXPERT_IMBALANCE
from ppfleetx.planner.memory import CARD_PARTS
from ppfleetx.planner.plan_to_config import plan_text
from ppfleetx.planner.prediction import Prediction, memory_prediction
from ppfleetx.planner.search import SearchResult

_BESIDE = ("total", "start", "host")


def ranking(found: SearchResult, cluster: Cluster, devices: int, goal: str) -> str:
    card = cluster.card
    lines = [
        f"{found.plans:,} legal plans for {devices:,} x {card.name} ({cluster.per_node} a node), "
        f"{found.too_large:,} of them too large with any micro batch",
        f"{found.candidates:,} micro batches and kinds of recompute of the others: {found.fit:,} fit into "
        f"{card.memory_gib:g} GiB, {found.unfit:,} do not, {found.slower:,} are slower than those that fit",
    ]
    if not found.best:
        why = (
            "No plan fits: take more cards, or larger ones."
            if found.plans
            else f"No plan divides the model and the batch among {devices:,} cards: take another number "
            f"of them{_usable(found)}."
        )
        return "\n".join([*lines, why])
    on_host = any(prediction.host for prediction in found.best)
    host = f" {'host GiB':>8}" if on_host else ""
    lines.append(
        f"{'step s':>9} {'up to s':>9} {'GiB':>6}{host} {'tokens/s':>11} {'MFU':>6} {'bubble':>7} "
        f"{'waits s':>8}  plan"
    )
    for prediction in found.best:
        time = prediction.time
        host = f" {prediction.host / GIB:8.1f}" if on_host else ""
        lines.append(
            f"{time.seconds:9.3f} {prediction.likely_at_most:9.3f} {prediction.fullest / GIB:6.1f}{host} "
            f"{prediction.tokens_per_second:11,.0f} {prediction.mfu:6.1%} {time.bubble:7.1%} "
            f"{time.exposed_communication:8.3f}  {plan_text(prediction.job)}"
        )
    lines.append(f"All plans compute in {found.best[0].job.precision.compute}.")
    if goal == "time":
        lines.append(
            "Ranked by 'up to': the time of plans whose tensor-parallel groups share a node and its network "
            "is less certain."
        )
    return "\n".join(lines)


def _usable(found: SearchResult) -> str:
    fewer = f" ({found.fewer_cards:,} can be used)" if found.fewer_cards else ""
    return f"{fewer}, or another batch (--batch {found.other_batch} divides)"


def parameters_text(model: ModelConfig) -> str:
    """Return a string with the number of parameters and, for a mixture of experts, the number of active
    parameters."""
    active = "" if model.moe is None else f", {active_count(model):,} of them active"
    return f"{parameter_count(model):,} parameters{active}"


def account(prediction: Prediction) -> str:
    """Return a full report on one plan as a string: model size, memory by stage and part, step time by
    part."""
    job, cluster, time = prediction.job, prediction.cluster, prediction.time
    low, middle, high = time.interval
    lines = [
        f"plan        {plan_text(job)} on {job.plan.world_size} x {cluster.card.name}",
        f"model       {parameters_text(job.model)}, sequences of {job.seq_len}, computed in "
        f"{job.precision.compute}",
        f"batch       {job.global_batch} sequences a step = {job.micro_batch} x {job.accumulate} micro "
        f"batches x {job.plan.data_size} data ranks",
        f"step        {middle:.3f} s, likely {low:.3f} to {high:.3f}; "
        f"{prediction.tokens_per_second:,.0f} tokens/s, MFU {prediction.mfu:.1%}",
        "time by part, of the busiest stage:",
    ]
    lines += [f"  {name:<17} {seconds:10.4f} s" for name, seconds in time.parts.items() if seconds > 0]
    lines.append("memory by part, GiB:")
    lines.append("  stage " + " ".join(f"{part[:10]:>10}" for part in (*CARD_PARTS, *_BESIDE)))
    for stage, memory in enumerate(prediction.memory):
        values = [getattr(memory, part) for part in (*CARD_PARTS, *_BESIDE)]
        lines.append(f"  {stage:5} " + " ".join(f"{value / GIB:10.2f}" for value in values))
    if job.plan.ep > 1:
        lines.append(
            f"experts     memory allows for a rank that receives {EXPERT_IMBALANCE:g} times the mean number "
            f"of rows; the worst case, all rows of its ep group, is {job.plan.ep} times"
        )
    verdict = "fits" if prediction.fits else "does not fit"
    lines.append(
        f"fullest rank {prediction.fullest / GIB:.1f} GiB: {verdict} into {cluster.card.memory_gib:g} GiB"
    )
    return "\n".join(lines)


def constants(cluster: Cluster) -> str:
    card = cluster.card
    peaks = ", ".join(f"{name} {value:g}" for name, value in card.peak_tflops.items())
    links = ", ".join(f"{size} cards {speed:g}" for size, speed in card.link_gb_s.items())
    network = cluster.network * 8e-9 if cluster.network else card.network_gbps
    return "\n".join(
        [
            f"Constants of {card.name} (planner/cards.yaml says what they mean; --card FILE changes them):",
            f"  peak TFLOP/s {peaks}; products reach {card.matmul_efficiency:.0%}, flash attention "
            f"{card.flash_efficiency:.0%}; {card.matmul_latency_us:g} us each, half of it when "
            f"{card.matmul_half_dim:g} wide",
            f"  memory {card.memory_gib:g} GiB, {card.memory_gb_s:g} GB/s, of which "
            f"{card.memory_efficiency:.0%}; "
            f"{card.kernel_latency_us:g} us an operation",
            f"  links GB/s: {links}; {card.link_latency_us:g} us; {cluster.per_node} cards a node",
            f"  network {network:g} Gbit/s a node, of which {card.network_efficiency:.0%}; "
            f"{card.network_latency_us:g} us; {card.collective_loss:.0%} a doubling of nodes",
        ]
    )


def memory_lines(cfg: RunConfig, device: str) -> list[str]:
    """Describe the predicted memory of the fullest device, as a list of lines. If ``Global.card`` is set, the
    last line says whether the run fits this card.

    The list is empty if the run does not train the built-in GPT.
    """
    prediction = memory_prediction(cfg, device)
    if prediction is None:
        return []
    stages, card = prediction.memory, prediction.cluster.card
    fullest = max(range(len(stages)), key=lambda number: stages[number].peak)
    worst = stages[fullest]
    where = f" on the fullest of {counted(len(stages), 'stage')} (stage {fullest})" if len(stages) > 1 else ""
    states = worst.parameters + worst.gradients + worst.masters + worst.optimizer
    passing = worst.activations + worst.logits + worst.temporary + worst.buffers
    lines = [
        f"about {bytes_text(worst.total)} a device{where}: parameters, gradients and states "
        f"{bytes_text(states)}, activations and temporaries {bytes_text(passing)}, driver and fragments "
        f"{bytes_text(worst.context + worst.fragments)}"
    ]
    if worst.host:
        lines.append(
            f"and {bytes_text(worst.host)} of host memory a process (states, or a copy while saving)"
        )
    if worst.start > worst.total:
        lines.append(f"and {bytes_text(worst.start)} while the model is built, before the first step")
    if cfg.Global.card is not None:
        lines.append(verdict(worst.peak, card.memory_gib * GIB, card.name))
    elif card.kernels != "cpu":
        attention = "flash" if prediction.job.flash else "the reference"
        lines.append(f"counted with {attention} attention; Global.card says what it has to fit into")
    return lines


def verdict(needed: float, there: float, card: str) -> str:
    """Return a sentence that says whether a run fits into the memory of a card.

    Args:
        needed: the bytes that the run needs on a card.
        there: the bytes of memory that a program can use on a card.
        card: the name of the card.
    """
    if needed <= there:
        return f"it fits {card}, of which {bytes_text(there)} can be used"
    return (
        f"it does NOT fit {card}, of which {bytes_text(there)} can be used: try a smaller "
        "Global.micro_batch_size, Model.use_recompute or more devices (ppfleetx plan ranks what fits)"
    )
