"""Arguments of ``pretrain_gpt.py`` for five GPT-2 configurations, as in the scripts of a Megatron-DeepSpeed
port. Each configuration trains on eight devices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ppfleetx.config.errors import ConfigError
from ppfleetx.config.reading.tree import is_index
from ppfleetx.dialects.user_options import normal_name

PROCESSES = 8
DEFAULT_SIZE, DEFAULT_STEPS = "345M", 500_000
SAVE = "ckpts/ckpts_tmp"
_DECAY_STEPS = 320_000


@dataclass(frozen=True)
class GPT2Size:
    """A configuration of GPT-2: parallel degrees, network, batch sizes and learning rate. All configurations
    train in float16 without dropout."""

    tensor: int
    pipeline: int
    layers: int
    hidden: int
    heads: int
    length: int
    batch: int
    micro_batch: int
    lr: float


SIZES: Mapping[str, GPT2Size] = {
    "345M": GPT2Size(1, 2, 24, 1024, 16, 1024, 16, 4, 1.5e-4),
    "1.3B": GPT2Size(2, 2, 24, 2048, 16, 1024, 32, 8, 2e-4),
    "2.7B": GPT2Size(2, 2, 32, 2560, 32, 2048, 32, 8, 1.6e-4),
    "3.7B": GPT2Size(2, 2, 32, 3072, 32, 2048, 16, 4, 1.2e-4),
    # No published script gives this batch size. 32 is one micro batch of 4 for each of the eight replicas.
    "345M_without_mp": GPT2Size(1, 1, 24, 1024, 16, 1024, 32, 4, 1.5e-4),
}


@dataclass(frozen=True)
class Request:
    """The parsed arguments of a GPT-2 training script.

    Attributes:
        data_path: the directory of the corpus and the vocabulary.
        size: the name of a model size, such as 345M.
        steps: the number of training steps.
        more: arguments of ``pretrain_gpt.py``, which override those of the model size.
    """

    data_path: str
    size: str
    steps: int
    more: tuple[str, ...]


def request_of(argv: Sequence[str]) -> Request:
    """Parse the arguments of a GPT-2 training script, which have the form ``--name=value``. Raises
    ConfigError if an argument is invalid."""
    own = {"data_path": "./data", "model_size": DEFAULT_SIZE, "train_iters": str(DEFAULT_STEPS)}
    more = []
    for number, word in enumerate(argv, start=1):
        name, equals, value = word.partition("=")
        if not word.startswith("--"):
            raise ConfigError("must be --name=value", key=word or "''", place=f"argument {number}")
        if normal_name(name) not in own:
            more.append(word)
        elif not equals or not value:
            raise ConfigError(f"needs a value: {name}=...", key=name, place=f"argument {number}")
        else:
            own[normal_name(name)] = value
    if own["model_size"] not in SIZES:
        raise ConfigError(f"must be one of {', '.join(SIZES)}", key="--model_size", value=own["model_size"])
    if not is_index(own["train_iters"]) or int(own["train_iters"]) < 1:
        raise ConfigError("must be a number of at least 1", key="--train_iters", value=own["train_iters"])
    return Request(own["data_path"], own["model_size"], int(own["train_iters"]), tuple(more))


def arguments_of(request: Request, *, evaluates: bool) -> list[str]:
    """Return the arguments of ``pretrain_gpt.py`` for ``request``. With ``evaluates``, the run is evaluated
    every 1000 steps, or at its end if it is shorter. Otherwise, it is never evaluated."""
    size, data = SIZES[request.size], Path(request.data_path)
    freq = 100 if request.steps >= 1000 else max(1, request.steps // 10)
    values = {
        "tensor-model-parallel-size": size.tensor,
        "pipeline-model-parallel-size": size.pipeline,
        "num-layers": size.layers,
        "hidden-size": size.hidden,
        "num-attention-heads": size.heads,
        "seq-length": size.length,
        "max-position-embeddings": size.length,
        "micro-batch-size": size.micro_batch,
        "global-batch-size": size.batch,
        "train-iters": request.steps,
        "lr-decay-iters": min(_DECAY_STEPS, request.steps),
        "save": SAVE,
        "data-path": data / "my-gpt_text_sentence",
        "vocab-file": data / "gpt2-vocab.json",
        "merge-file": data / "gpt2-merges.txt",
        "data-impl": "mmap",
        "split": "949,50,1",
        "lr": size.lr,
        "min-lr": size.lr / 10,
        "lr-decay-style": "cosine",
        "lr-warmup-fraction": 0.01,
        "num-workers": 2,
        "weight-decay": 0.01,
        "clip-grad": 1.0,
        "log-interval": freq,
        "save-interval": 100_000,
        "eval-interval": 1000 if request.steps >= 1000 else request.steps,
        "eval-iters": 10 if evaluates else 0,
        "seed": 1234,
        "attention-dropout": 0.0,
        "hidden-dropout": 0.0,
        "zero-stage": 0,
        "initial-loss-scale": 4096,
        "loss-scale-window": 500,
        "hysteresis": 2,
    }
    flags = ["fp16", "checkpoint-activations", "deepspeed", "deepspeed-activation-checkpointing"]
    given = {normal_name(word.partition("=")[0]) for word in request.more if word.startswith("--")}
    kept = [f"--{name}={value}" for name, value in values.items() if normal_name(name) not in given]
    return [*kept, *(f"--{flag}" for flag in flags if normal_name(flag) not in given), *request.more]
