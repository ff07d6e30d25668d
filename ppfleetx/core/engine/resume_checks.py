"""Compare a checkpoint with the current configuration and data. Some differences are errors, others are only
logged.

``ppfleetx.config.resume_policy`` says what each configuration key affects.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ppfleetx.checkpoint.reader import Checkpoint
from ppfleetx.checkpoint.weights import network_of
from ppfleetx.config.errors import CheckpointError
from ppfleetx.config.resume_policy import Change, Effect, changes, first_difference, network
from ppfleetx.config.sections.engine import SaveLoadConfig
from ppfleetx.config.sections.root import ModelConfig, RunConfig
from ppfleetx.utils.log import get_logger

Fingerprints = Mapping[str, str | None]


# Keys of the Model section in which a new run may differ from the run that trained its weights, to extend the
# context length.
_STRETCHING = ("rotary_base", "rope_scaling")
# Keys that determine how many times a run reads its corpus.
_LENGTH = ("Engine.max_steps", "Engine.num_train_epochs", "Global.global_batch_size")


def check_same_function(checkpoint: Checkpoint, model: ModelConfig, *, may_stretch: bool = False) -> None:
    """Raise CheckpointError if the checkpoint's weights would compute a different function under the settings
    in ``model`` than in the run that saved them, for example because of another activation.

    Args:
        may_stretch: whether rotary settings can differ, as when a new run extends the context length.
    """
    saved = checkpoint.manifest.config
    if not isinstance(saved, Mapping) or not saved.get("Model"):
        return  # a checkpoint that another program wrote, without a configuration
    section = {k: v for k, v in saved["Model"].items() if k in ModelConfig.model_fields}
    trained = network_of(section, f"checkpoint {checkpoint.path}")
    now = network(model, (Effect.FUNCTION,))
    for key, then in network(trained, (Effect.FUNCTION,)).items():
        if then != now[key] and may_stretch and key in _STRETCHING:
            get_logger().info(
                f"the weights were trained with Model.{key} = {then!r} and continue with {now[key]!r}"
            )
        elif then != now[key]:
            change = first_difference(f"Model.{key}", then, now[key])
            sizes = trained.hidden_size, model.hidden_size
            if key == "head_dim" and model.head_dim is None and sizes[0] != sizes[1]:
                change = Change("Model.hidden_size", *sizes)  # the size of a head follows from it
            raise CheckpointError(
                f"checkpoint {checkpoint.path} was trained with {change.key} = {change.then!r}, "
                f"this configuration has {change.now!r}: the same weights would compute something else; "
                f"set {change.key} to {change.then!r}"
            )
    _check_adapters(checkpoint, trained, model)


def _check_adapters(checkpoint: Checkpoint, trained: ModelConfig, model: ModelConfig) -> None:
    if trained.lora is None:
        return
    if model.lora is None:
        raise CheckpointError(
            f"checkpoint {checkpoint.path} was trained with adapters: give the Model.lora section of that "
            f"run (Model.lora.rank={trained.lora.rank}, Model.lora.alpha={trained.lora.alpha:g}, ...), or "
            "merge them with the weights by ppfleetx merge"
        )
    if trained.lora.scale != model.lora.scale:
        raise CheckpointError(
            f"checkpoint {checkpoint.path} was trained with Model.lora.alpha / rank = "
            f"{trained.lora.scale:g}, this configuration has {model.lora.scale:g}: "
            "the adapters would count differently"
        )


def check_resumed(checkpoint: Checkpoint, cfg: RunConfig, now: Fingerprints) -> list[Change]:
    """Return the settings that changed since the checkpoint and affect training, optimizer or evaluation.
    ``now`` has the current hashes of the tokenizer and of the training data.

    Raises:
        CheckpointError: the tokenizer changed; the training data changed and ``reset_data`` is not set; or
            the optimizer changed and its state would be loaded (``load_optim``).
    """
    _check_data(checkpoint, cfg, now)
    saved = checkpoint.manifest.config
    if not isinstance(saved, Mapping):
        return []
    if cfg.Engine.save_load.load_optim and (found := changes(saved, cfg, (Effect.OPTIMIZER,))):
        raise CheckpointError(
            f"checkpoint {checkpoint.path} was trained with {found[0].key} = {found[0].then!r}, this "
            f"configuration has {found[0].now!r}, whose state differs; "
            "Engine.save_load.load_optim=False drops the checkpoint's and starts with a fresh optimizer"
        )
    return changes(saved, cfg, (Effect.OPTIMIZER, Effect.TRAINING, Effect.EVALUATION))


def optimizer_state_may_differ(checkpoint: Checkpoint, cfg: RunConfig) -> bool:
    """Return whether the checkpoint's optimizer state might not fit, because settings of the model or the
    optimizer in ``cfg`` differ from those in the checkpoint."""
    effects = (Effect.SHAPE, Effect.OPTIMIZER, Effect.TRAINING)
    changed = changes(checkpoint.manifest.config, cfg, effects)
    return any(change.key.startswith(("Model", "Optimizer")) for change in changed)


def _check_data(checkpoint: Checkpoint, cfg: RunConfig, now: Fingerprints) -> None:
    saved: Mapping[str, Any] = checkpoint.manifest.fingerprints
    if saved.get("tokenizer") and now.get("tokenizer") and saved["tokenizer"] != now["tokenizer"]:
        raise CheckpointError(
            f"checkpoint {checkpoint.path} was trained with another tokenizer than Data.tokenizer names; to "
            "start a new run from its weights anyway, use Engine.save_load.init_from"
        )
    if saved.get("data") != now.get("data") and not cfg.Engine.save_load.reset_data:
        raise CheckpointError(
            f"the training data or its order is not the one checkpoint {checkpoint.path} was reading "
            f"({_why_other_data(checkpoint, cfg)}), so its position means nothing here; "
            "Engine.save_load.reset_data=True starts the data from the beginning"
        )


def _why_other_data(checkpoint: Checkpoint, cfg: RunConfig) -> str:
    saved = checkpoint.manifest.config
    if isinstance(saved, Mapping):
        if data := changes(saved, cfg, (Effect.DATA,)):
            return ", ".join(map(str, data))
        if length := [one for one in changes(saved, cfg, tuple(Effect)) if one.key in _LENGTH]:
            return (
                f"{', '.join(map(str, length))}: the run reads the corpus another number of times, and all "
                "its epochs are shuffled together"
            )
    return "corpus, split, seed, sequence length or number of epochs changed"


def log_changes(checkpoint: Checkpoint, changed: Sequence[Change], options: SaveLoadConfig) -> None:
    """Log a warning that lists how this run differs from the run that saved ``checkpoint``: the settings in
    ``changed``, a fresh optimizer, or data from the beginning. Logs nothing if there is no difference."""
    differences = [*map(str, changed)]
    if not options.load_optim:
        differences.append("a fresh optimizer (Engine.save_load.load_optim = False)")
    if options.reset_data:
        differences.append("data from the beginning (Engine.save_load.reset_data = True)")
    if differences:
        get_logger().warning(
            f"from here on this run computes something else than the one that saved {checkpoint.path}: "
            f"{', '.join(differences)}"
        )
