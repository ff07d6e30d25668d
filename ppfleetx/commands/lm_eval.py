"""Implement ``ppfleetx lm-eval``, which evaluates a checkpoint on tasks of lm-evaluation-harness
(https://github.com/EleutherAI/lm-evaluation-harness, 0.4)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ppfleetx.commands.generate import check_checkpoint, check_output, load_generator
from ppfleetx.commands.initialize import start_with
from ppfleetx.config.errors import ConfigError
from ppfleetx.config.rules import check_one_process
from ppfleetx.utils.output_files import atomic_write

if TYPE_CHECKING:
    from ppfleetx.commands.model_verbs import LmEval


def run(options: LmEval) -> None:
    """Evaluate the checkpoint on the chosen tasks, and print lm-evaluation-harness's table of results."""
    with options.job() as job:
        _check(options)
        cfg = job.load()
        check_checkpoint(cfg)
        check_one_process(cfg, "lm-evaluation-harness")
        cfg, ctx = start_with(cfg)
        names = options.tasks.split(",")
        manager = find_tasks(names, options.include_path)
        import lm_eval
        from lm_eval.utils import make_table

        from ppfleetx.commands.lm_eval_model import HarnessModel

        generator = load_generator(cfg, ctx)
        results = lm_eval.simple_evaluate(
            model=HarnessModel(generator, cfg.Model.vocab_size, batch_size=options.batch_size),
            tasks=names,
            task_manager=manager,
            num_fewshot=options.num_fewshot,
            limit=options.limit,
            bootstrap_iters=0,
            log_samples=False,
        )
    print(make_table(results), flush=True)
    if options.output is not None:
        with atomic_write(options.output, "w") as file:
            json.dump(results["results"], file, indent=2, default=str)


def _check(options: LmEval) -> None:
    if find_spec("lm_eval") is None:
        raise ConfigError("this program needs lm-evaluation-harness: pip install 'ppfleetx[lm_eval]'")
    if (options.num_fewshot or 0) < 0:
        raise ConfigError("must be at least 0", key="--num-fewshot", value=options.num_fewshot)
    if options.output is not None:
        check_output(Path(options.output), mark=b'"alias": ')
    if options.include_path is not None and not Path(options.include_path).is_dir():
        raise ConfigError("there is no such directory", key="--include-path", value=options.include_path)


def find_tasks(tasks: Sequence[str], include_path: str | None) -> Any:
    """Return a ``TaskManager`` of lm-evaluation-harness that has definitions of all ``tasks``.
    ``include_path`` is a directory with further task definitions. Raises ConfigError for an unknown task.
    """
    from lm_eval.tasks import TaskManager

    if include_path is not None:  # try it alone first: listing the harness's own tasks takes 30 s
        manager = TaskManager(include_path=include_path, include_defaults=False)
        if all(manager.match_tasks([name]) for name in tasks):
            return manager
    manager = TaskManager(include_path=include_path)
    unknown = [name for name in tasks if not manager.match_tasks([name])]
    if unknown:
        raise ConfigError(
            "lm-evaluation-harness has no such task; `lm_eval ls tasks` lists them, and --include-path adds "
            "definitions of your own",
            key="--tasks",
            value=unknown[0],
        )
    return manager
