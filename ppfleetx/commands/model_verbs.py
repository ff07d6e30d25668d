"""The verbs that use a trained model. Each verb imports its implementation only when it runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import MISSING, dataclass
from typing import TYPE_CHECKING, ClassVar

from ppfleetx.commands.launching import LaunchOptions
from ppfleetx.commands.options import OptionalConfigOptions, option, positional, whole_number
from ppfleetx.config.errors import ConfigError, naming
from ppfleetx.utils.launcher_env import world_size

if TYPE_CHECKING:
    from ppfleetx.config.loader import ConfigSource
    from ppfleetx.config.reading.overrides import Override, Setting
    from ppfleetx.config.sections.root import RunConfig


MODEL_HELP = (
    "a run's directory, one of its checkpoints, a directory of Hugging Face or FleetX, a GGUF file, or "
    "hf:ORG/NAME, which is downloaded from the Hugging Face hub"
)


@dataclass(frozen=True)
class ModelSource:
    """What a model's configuration is loaded from: the user's file or the checkpoint's own configuration,
    with overrides."""

    config: ConfigSource
    overrides: list[Override]

    def load(self, *more: Override) -> RunConfig:
        """Load the configuration with its overrides and with ``more``, further overrides that are applied
        last. The number of processes is that of the launcher."""
        from ppfleetx.config.loader import load_config

        return load_config(self.config, [*self.overrides, *more], world_size=world_size())


@dataclass(frozen=True, kw_only=True)
class ModelOptions(OptionalConfigOptions):
    """Base class of verbs (subcommands) that use a model. It has CHECKPOINT, ``-c FILE`` and
    ``-o Section.key=value``."""

    intermixed: ClassVar[bool] = True

    checkpoint: str | None = positional(
        "CHECKPOINT",
        f"{MODEL_HELP}; it needs nothing else. Without it: -c FILE, which names the "
        "checkpoint in Engine.save_load.ckpt_dir",
    )

    def job(self, *settings: Setting) -> AbstractContextManager[ModelSource]:
        """Return a context manager that yields a :class:`ModelSource` for the model that these options name.
        ``settings`` are additional overrides of its configuration."""
        return job_of(self.checkpoint, self.config, [*self.override, *self.settings(), *settings])


@contextmanager
def job_of(
    checkpoint: str | None,
    config: str | None,
    overrides: list[Override],
    *,
    key: str = "Engine.save_load.ckpt_dir",
    option: str = "CHECKPOINT",
) -> Iterator[ModelSource]:
    """Context manager that yields a :class:`ModelSource` for the model in ``checkpoint``. A model in Hugging
    Face's or GGUF format is converted to temporary files, which are removed when the context ends.

    Args:
        checkpoint: the model; None: the configuration names it.
        config: the configuration to use; None: the model's own.
        overrides: the user's overrides of the configuration.
        key: the configuration key to set to the checkpoint's directory.
        option: the command-line option that gave ``checkpoint``, for messages.
    """
    if checkpoint is None and config is None:
        raise ConfigError(f"give {option}, the directory of a model, or -c FILE")
    if checkpoint is None:
        yield ModelSource(config, overrides)
        return
    from ppfleetx.commands.resolve_model import resolve_model

    with ExitStack() as stack:
        with naming(option, checkpoint):
            place = resolve_model(checkpoint, stack, with_config=config is None)
        yield ModelSource(config or place.config, place.overrides(overrides, option=option, key=key))


@dataclass(frozen=True, kw_only=True)
class Generate(LaunchOptions, ModelOptions):
    """Continue prompts with a checkpoint.

    CHECKPOINT is a directory: a run, one of its checkpoints, or a model of Hugging Face or FleetX. Its
    generation settings are used; -o Generation.KEY=VALUE changes them. Prompts may also come from
    Generation.prompt and Generation.prompt_file.
    """

    examples = """\
examples:
  ppfleetx generate output "Once upon a time"
  ppfleetx generate output/epoch_0_step_500 -o Generation.temperature=0.7 -o Generation.max_dec_len=50 "def "
  ppfleetx generate -c FILE -o Engine.save_load.ckpt_dir=output -o Generation.prompt_file=prompts.txt
"""
    prompt: tuple[str, ...] = positional("PROMPT", "texts to continue", default=(), key="Generation.prompt")
    output: str | None = option("also write prompts and results as jsonl", metavar="FILE")

    program = "generate:run"


@dataclass(frozen=True, kw_only=True)
class Chat(ModelOptions):
    """Chat with a model, in the terminal or over a pipe.

    CHECKPOINT is a directory: a run, one of its checkpoints, or a model of Hugging Face or FleetX. Its chat
    template and its generation settings are used; -o Generation.KEY=VALUE changes the settings. Each line is
    a message; /help lists the commands.
    """

    examples = """\
examples:
  ppfleetx chat output
  ppfleetx chat output --system "You are brief." -o Generation.temperature=0.7 -o Generation.max_dec_len=200
  echo "What is a list?" | ppfleetx chat output
"""
    system: str | None = option("the system message", metavar="TEXT")
    template: str | None = option("one of the model's chat templates, or a file", metavar="NAME")

    program = "chat:run"


@dataclass(frozen=True, kw_only=True)
class Evaluate(LaunchOptions, ModelOptions):
    """Evaluate a checkpoint: print its loss and perplexity on Data.Eval, or a classifier's scores.

    With --text, or with Model.module: GPTEvalModule, print instead the perplexity of a text file, or how
    often the model predicts the last word of a text (Offline_Eval, docs/evaluation.md).
    """

    examples = """\
examples:
  ppfleetx eval output
  ppfleetx eval output --text wiki.test.tokens
  ppfleetx eval -c gpt/eval_gpt_345M_single_card -o Engine.save_load.ckpt_dir=output
"""
    text: str | None = option(
        "perplexity of this text (Offline_Eval.eval_path)", key="Offline_Eval.eval_path", metavar="FILE"
    )
    output: str | None = option(
        "where results are written (Engine.save_load.output_dir)",
        key="Engine.save_load.output_dir",
        metavar="DIR",
    )

    program = "evaluate:run"


@dataclass(frozen=True, kw_only=True)
class LmEval(ModelOptions):
    """Evaluate a checkpoint on tasks of lm-evaluation-harness (docs/evaluation.md)."""

    tasks: str = option("tasks or groups of the harness", default=MISSING, metavar="NAME[,NAME...]")
    batch_size: int = option("texts per forward pass (default: 8)", default=8, type=whole_number)
    num_fewshot: int | None = option("examples in each prompt (default: the task's)")
    limit: int | None = option("at most this many examples of each task", type=whole_number)
    include_path: str | None = option("directory with further task definitions", metavar="DIR")
    output: str | None = option("also write the results as JSON", metavar="FILE")

    program = "lm_eval:run"


@dataclass(frozen=True, kw_only=True)
class Infer(LaunchOptions, OptionalConfigOptions):
    """Continue prompts with an exported model.

    EXPORT is the output of `ppfleetx export`; with -c FILE, Inference.model_dir names it. Prompts may also
    come from Generation.prompt and Generation.prompt_file.
    """

    examples = """\
examples:
  ppfleetx infer exported "Once upon a time"
  ppfleetx infer -c gpt/inference_gpt_345M_single_card -o Inference.model_dir=exported
"""
    intermixed = True

    export: str | None = positional("EXPORT", "directory of an exported model", key="Inference.model_dir")
    prompt: tuple[str, ...] = positional("PROMPT", "texts to continue", default=(), key="Generation.prompt")
    output: str | None = option("also write prompts and results as jsonl", metavar="FILE")

    @property
    def num_processes(self) -> None:
        """None, because an exported model can run in any number of processes."""
        return

    program = "infer:run"
