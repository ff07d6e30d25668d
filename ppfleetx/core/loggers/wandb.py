"""Weights & Biases."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ppfleetx.config.errors import ConfigError
from ppfleetx.core.loggers.base import LogStart, LogWriter
from ppfleetx.utils.log import get_logger


class Wandb(LogWriter):
    """Writes a run of Weights & Biases, offline unless the user asks for more: ``mode: online``, or the
    variable ``WANDB_MODE``. ``wandb sync`` uploads what was written offline.

    A run that goes on keeps its id, so that its steps are added to the same curves.

    Args:
        output_dir: the directory of the run; the files are in ``wandb/`` there.
        project: as of ``wandb.init``.
        name: of the run; None: the name of ``output_dir``.
        entity: as of ``wandb.init``.
        group: as of ``wandb.init``.
        mode: ``offline``, ``online`` or ``disabled``; None: ``WANDB_MODE``, else ``offline``.
        dir: in the place of ``output_dir``.
    """

    def __init__(
        self,
        output_dir: Path,
        project: str = "ppfleetx",
        name: str | None = None,
        entity: str | None = None,
        group: str | None = None,
        mode: str | None = None,
        dir: str | None = None,
    ) -> None:
        super().__init__(output_dir)
        self._mode = mode or os.environ.get("WANDB_MODE") or "offline"
        if self._mode not in ("offline", "online", "disabled"):
            raise ConfigError(
                "mode of wandb is offline, online or disabled", key="Engine.loggers", value=self._mode
            )
        self._given = {"project": project, "name": name or output_dir.resolve().name}
        self._given |= {"entity": entity, "group": group}
        self._directory = output_dir if dir is None else Path(dir)
        self._id: str | None = None
        self._run: Any = None

    def start(self, start: LogStart) -> None:
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # no word to its makers either
        import wandb

        self._directory.mkdir(parents=True, exist_ok=True)
        try:
            self._run = wandb.init(
                **self._given,
                dir=str(self._directory),
                mode=self._mode,
                id=self._id,
                resume="allow" if self._mode == "online" else None,
                config=dict(start.config),
                reinit="create_new",
                settings=wandb.Settings(console="off", silent=True, x_disable_stats=True),
            )
        except wandb.Error as error:
            raise ConfigError(f"wandb cannot start: {error}", key="Engine.loggers", value="wandb") from error
        self._id = self._run.id
        if self._mode == "offline":
            get_logger().info(f"wandb: offline; `wandb sync {Path(self._run.dir).parent}` uploads the run")

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        self._run.log(dict(numbers), step=step)

    def finish(self) -> None:
        self._run.finish()

    def state(self) -> Mapping[str, Any]:
        return {} if self._id is None else {"id": self._id}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self._id = str(state["id"])
