"""Derive a training configuration (a recipe) from the depth of the model, by the rules in docs/planner.md."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import yaml

from ppfleetx.config.errors import ConfigError
from ppfleetx.config.loader import read_config
from ppfleetx.config.message_text import counted
from ppfleetx.config.parallel_plan import ParallelPlan
from ppfleetx.config.reading.parse import Sections
from ppfleetx.config.sections.model import ModelConfig
from ppfleetx.config.sections.root import RunConfig
from ppfleetx.config.validate import section_of
from ppfleetx.models.gpt.spec import parameter_count
from ppfleetx.planner.cards import GIB, Card, load_card
from ppfleetx.planner.communication import Cluster
from ppfleetx.planner.job import job_of
from ppfleetx.planner.plan_to_config import UnresolvedConfig, plan_text
from ppfleetx.planner.prediction import Prediction, run_length
from ppfleetx.planner.search import search
from ppfleetx.utils.device_support import CPU

_HEAD_SIZE = 64
_WARMUP_STEPS = 2000
MAX_TOKENS_PER_PARAM = 1_000_000  # more tokens mean a larger batch, and a larger batch a longer search


@dataclass(frozen=True)
class RecipeInputs:
    """The inputs of a recipe. The properties, such as the batch size, follow from the inputs alone, without a
    parallel plan.

    Attributes:
        depth: the number of layers.
        cards: the number of accelerator cards.
        card: the type of the cards: a name in ``cards.yaml``, or a YAML file that describes the card.
        tokens_per_param: training tokens per parameter.
    """

    depth: int
    cards: int
    card: str
    tokens_per_param: float = 20.0
    seq_len: int = 2048
    vocab_size: int = 32768

    @cached_property
    def kind(self) -> Card:
        """The description of ``card``: its constants of speed and memory. Raises ConfigError if ``card`` is
        unknown."""
        return load_card(self.card, key="--cards")

    @property
    def width(self) -> int:
        return _HEAD_SIZE * self.depth

    @property
    def model(self) -> dict[str, Any]:
        """The section ``Model``: a GPT with the blocks of Qwen3."""
        return {
            "vocab_size": self.vocab_size,
            "hidden_size": self.width,
            "num_layers": self.depth,
            "num_attention_heads": self.depth,
            "max_position_embeddings": self.seq_len,
            "position_embedding_type": "rope",
            "normalization": "RMSNorm",
            "hidden_act": "swiglu",
            "qk_layernorm": True,
            "add_bias_linear": False,
            "tie_word_embeddings": False,
            "hidden_dropout_prob": 0.0,
            "attention_probs_dropout_prob": 0.0,
        }

    @cached_property
    def num_params(self) -> int:
        """The number of parameters of the model. Raises ConfigError if the model is too large."""
        return parameter_count(section_of(ModelConfig, self.model))

    @property
    def tokens(self) -> float:
        """Tokens to train on. The default of 20 per parameter follows "Chinchilla" (Hoffmann et al. 2022)."""
        return self.tokens_per_param * self.num_params

    @property
    def compute(self) -> float:
        """FLOPs of the whole run, without those of the embeddings ("DeepSeek LLM", Bi et al. 2024, equation
        2)."""
        per_token = self.depth * self.width * (72 * self.width + 12 * self.seq_len)
        return per_token * self.tokens

    @property
    def learning_rate(self) -> float:
        """The peak learning rate ("DeepSeek LLM", Bi et al. 2024, equation 1), rounded to three digits."""
        return _rounded(0.3118 * self.compute**-0.1250)

    @property
    def batch(self) -> int:
        """The global batch size in sequences: a multiple of ``cards`` near the optimum of "DeepSeek LLM" (Bi
        et al. 2024, eq. 1)."""
        # The result is ``cards`` times a power of two.
        power_of_two = self.cards & -self.cards
        odd = self.cards // power_of_two
        wanted = 0.2920 * self.compute**0.3271 / self.seq_len
        return odd * max(power_of_two, 2 ** max(0, round(math.log2(wanted / odd))))

    @property
    def steps(self) -> int:
        return math.ceil(self.tokens / (self.batch * self.seq_len))


@dataclass(frozen=True)
class Recipe:
    inputs: RecipeInputs
    values: dict[str, Any]
    prediction: Prediction

    def summary(self, price: float | None = None) -> list[str]:
        """Return a summary as a list of lines: model size, run length, plan, predicted time, memory and cost.

        Args:
            price: the price of a card-hour; None: the cost is given in card-hours only.
        """
        inputs, found = self.inputs, self.prediction
        run = run_length(found, inputs.steps * found.job.tokens)
        cost = "" if price is None else f", which cost {run.cost(price)[0]:,.2f} at {price:g} each"
        return [
            f"{inputs.num_params:,} parameters",
            f"{inputs.tokens:.4g} tokens, {inputs.tokens_per_param:g} a parameter, in "
            f"{counted(inputs.steps, 'step', ',')} of {found.job.tokens:,}",
            f"{inputs.cards} x {inputs.kind.name}: {plan_text(found.job)}",
            f"{found.time.seconds:.3f} s a step, likely up to {found.likely_at_most:.3f} s; "
            f"{found.tokens_per_second:,.0f} tokens/s, MFU {found.mfu:.1%}",
            f"{found.fullest / GIB:.1f} of {inputs.kind.memory_gib:g} GiB on the fullest card",
            f"{run.days * 24:,.2f} hours, {run.card_hours:,.2f} card-hours{cost}",
        ]

    def yaml(self, price: float | None = None) -> str:
        head = (
            *self.summary(price),
            "The rules and their sources: docs/planner.md, A configuration from one number.",
        )
        comments = "".join(f"# {line}\n" for line in head)
        return comments + yaml.safe_dump(self.values, sort_keys=False, width=110)


def recipe(inputs: RecipeInputs, per_node: int = 8) -> Recipe:
    """Return the training configuration for ``inputs`` with the fastest parallel plan.

    ``per_node`` is the number of cards in a node.

    Raises:
        ConfigError: no plan fits into memory, or the model or the run is too large.
    """
    if inputs.tokens_per_param > MAX_TOKENS_PER_PARAM:
        raise ConfigError(
            f"must be at most {MAX_TOKENS_PER_PARAM:,}",
            key="--tokens-per-param",
            value=inputs.tokens_per_param,
        )
    values = _values(inputs)
    written = UnresolvedConfig(*read_config(Sections(values, "the recipe")))
    whole = job_of(written.under(ParallelPlan(), 1, inputs.batch, None), inputs.kind)
    found = search(whole, Cluster(inputs.kind, per_node), inputs.cards, asked_in="--cards")
    if not found.best:
        raise ConfigError(
            f"a model of depth {inputs.depth} fits under no plan: take more cards, or larger ones",
            key="--cards",
            value=f"{inputs.cards}x{inputs.card}",
        )
    best = found.best[0]
    job = best.job
    cfg = written.under(job.plan, job.micro_batch, job.global_batch, job.recomputed[0])
    return Recipe(inputs, _under_plan(values, cfg), best)


def _rounded(rate: float) -> float:
    return float(f"{rate:.3g}")


def _values(inputs: RecipeInputs) -> dict[str, Any]:
    """Return the values of the configuration that do not depend on the parallel plan."""
    rate, steps = inputs.learning_rate, inputs.steps
    dataset = {"input_dir": "./data", "split": "98,2,0", "max_seq_len": inputs.seq_len}
    return {
        "Global": {
            "device": CPU if inputs.kind.kernels == "cpu" else "auto",
            "card": inputs.card,
            "seed": 1024,
            "global_batch_size": inputs.batch,
        },
        "Engine": {
            "max_steps": steps,
            "logging_freq": 10,
            "eval_freq": max(1, steps // 20),
            "eval_iters": 10,
            "mix_precision": _precision(inputs.kind),
            "save_load": {"save_steps": max(1, steps // 10), "output_dir": f"./output/d{inputs.depth}"},
        },
        "Model": inputs.model,
        "Data": {"Train": {"dataset": dataset}, "Eval": {"dataset": {**dataset}}},
        "Optimizer": {
            "name": "Muon",
            "weight_decay": 0.1,
            "beta1": 0.9,
            "beta2": 0.95,
            "muon": {"scale": "match_rms_adamw"},
            "lr": {
                "decay_style": "cosine",
                # Set explicitly, so that a trial of a few steps follows the schedule of the whole run.
                "decay_steps": steps,
                "warmup_steps": min(_WARMUP_STEPS, steps // 20),
                "max_lr": rate,
                "min_lr": _rounded(rate / 10),
            },
            "grad_clip": {"clip_norm": 1.0},
        },
    }


def _precision(card: Card) -> dict[str, Any]:
    if card.kernels == "cpu":
        return {"enable": "auto", "dtype": "bfloat16"}
    if "bfloat16" in card.peak_tflops:
        return {"enable": True, "dtype": "bfloat16", "level": "O2", "main_grad_fp32": True}
    if "float16" in card.peak_tflops:
        return {"enable": True, "dtype": "float16", "level": "O2"}
    return {"enable": False}


def _under_plan(values: dict[str, Any], cfg: RunConfig) -> dict[str, Any]:
    keys = ("sequence_parallel", "virtual_pp_degree", "use_recompute", "recompute_granularity")
    changed = {
        "Global": {**values["Global"], "micro_batch_size": cfg.Global.micro_batch_size},
        "Model": {**values["Model"], **cfg.Model.model_dump(include=set(keys), exclude_defaults=True)},
        "Distributed": cfg.Distributed.model_dump(mode="json", exclude_defaults=True),
    }
    return {**values, **changed}
