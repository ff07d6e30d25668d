"""MindFormers: ``run_mindformer.py`` and its YAML files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ppfleetx.dialects.given import given_in, without_launcher
from ppfleetx.dialects.keys import KeyTable, read_file, tables_of
from ppfleetx.dialects.mindformers import rules
from ppfleetx.dialects.mindformers.arguments import FLAGS, read_command_line
from ppfleetx.dialects.registry import Dialect
from ppfleetx.dialects.translation import Translation, translate

TABLE = KeyTable([key for keys in tables_of(read_file("mindformers")).values() for key in keys])
_RULES = (
    rules.network,
    rules.device,
    rules.degrees,
    rules.experts,
    rules.batch,
    rules.data,
    rules.checkpoint,
    rules.length,
    rules.writing,
    rules.generation,
)

_BLOCKS = frozenset(
    {"base_config", "context", "parallel", "recompute_config", "parallel_config", "moe_config"}
    | {"runner_config", "runner_wrapper", "lr_schedule", "callbacks", "processor", "trainer"}
    | {"train_dataset", "train_dataset_task", "eval_dataset", "eval_dataset_task"}
)


@dataclass(frozen=True)
class MindFormersRun:
    """A translated command line of ``run_mindformer.py``.

    Attributes:
        translation: the configuration.
        mode: the run mode: train, finetune, eval or predict.
        checks: whether to print only a report.
    """

    translation: Translation
    mode: str
    checks: bool


def run_of(argv: Sequence[str]) -> MindFormersRun:
    """Translate the arguments of ``run_mindformer.py`` and the file they name."""
    line = read_command_line(argv)
    result = translate("MindFormers", str(line.path), given_in(line.tree), TABLE, _RULES)
    result.unused.extend(line.unused)
    return MindFormersRun(result, rules.run_mode(result), line.checks)


DIALECT = Dialect(
    name="mindformers",
    title="MindFormers",
    tables={"the configuration": TABLE, "run_mindformer.py": FLAGS},
    of_file=lambda path, more: run_of(["--config", str(path), *more]).translation,
    of_arguments=lambda argv: run_of(without_launcher(argv)[1]).translation,
    programs=frozenset({"run_mindformer.py"}),
    keys_of_files=_BLOCKS,
    options=frozenset({"config", "run_mode", "device_target", "use_parallel", "dataset_dir", "predict_data"}),
)
