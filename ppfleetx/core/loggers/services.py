"""Writers for tracking services: Weights & Biases and MLflow."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ppfleetx.config.errors import ConfigError
from ppfleetx.config.yaml_dump import flat_values
from ppfleetx.core.loggers.base import LogStart, LogWriter
from ppfleetx.utils.log import get_logger


class _Continued(LogWriter):
    """Base class of writers for services. Checkpoints store the id of the run at the service, so that a
    resumed run continues the same curves."""

    _id: str | None = None

    def state(self) -> Mapping[str, Any]:
        return {} if self._id is None else {"id": self._id}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self._id = str(state["id"])


class Wandb(_Continued):
    """Logs to Weights & Biases, offline by default. ``wandb sync`` uploads an offline run.

    Args:
        output_dir: the run's output directory.
        project, entity, group: see ``wandb.init``.
        name: name of the run; None: the name of ``output_dir``.
        mode: ``offline``, ``online`` or ``disabled``; None: the value of ``WANDB_MODE``, by default
            ``offline``.
        dir: directory for the folder ``wandb``; None: ``output_dir``.
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
        self._run: Any = None

    def start(self, start: LogStart) -> None:
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # send no error reports
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


_NOT_IN_NAMES = re.compile(r"[^\w\-./ ]")
_LONGEST_VALUE, _PER_CALL = 500, 100


class MLflow(_Continued):
    """Logs to MLflow, by default to local files.

    Args:
        uri: URI of the tracking store; None: ``MLFLOW_TRACKING_URI``, by default ``mlruns/`` in
            ``output_dir``.
        experiment: name of the experiment, which is created if necessary.
        name: name of the run; None: the name of ``output_dir``.
    """

    def __init__(
        self,
        output_dir: Path,
        uri: str | None = None,
        experiment: str = "ppfleetx",
        name: str | None = None,
    ) -> None:
        super().__init__(output_dir)
        self._uri = uri or os.environ.get("MLFLOW_TRACKING_URI") or (output_dir.resolve() / "mlruns").as_uri()
        self._experiment, self._name = experiment, name or output_dir.resolve().name
        self._client: Any = None

    def start(self, start: LogStart) -> None:
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        if self._uri.startswith("file:"):  # a database would need full MLflow instead of `mlflow-skinny`
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        from mlflow import MlflowClient
        from mlflow.entities import Param
        from mlflow.exceptions import MlflowException

        try:
            self._client = MlflowClient(self._uri)
            if self._id is not None:
                self._client.update_run(self._id, status="RUNNING")
                return
            experiment = self._client.get_experiment_by_name(self._experiment)
            if experiment is None:
                number = self._client.create_experiment(self._experiment)
            else:
                number = experiment.experiment_id
            self._id = self._client.create_run(number, run_name=self._name).info.run_id
            params = [
                Param(_NOT_IN_NAMES.sub("_", key), str(value)[:_LONGEST_VALUE])
                for key, value in flat_values(start.config)
            ]
            for first in range(0, len(params), _PER_CALL):
                self._client.log_batch(self._id, params=params[first : first + _PER_CALL])
        except MlflowException as error:
            raise ConfigError(
                f"mlflow cannot start: {error}", key="Engine.loggers", value="mlflow"
            ) from error

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        from mlflow.entities import Metric
        from mlflow.exceptions import MlflowException

        now = int(1000 * time.time())
        metrics = [Metric(_NOT_IN_NAMES.sub("_", name), value, now, step) for name, value in numbers.items()]
        try:
            self._client.log_batch(self._id, metrics=metrics)
        except MlflowException as error:
            raise OSError(str(error)) from error

    def finish(self) -> None:
        from mlflow.exceptions import MlflowException

        try:
            self._client.set_terminated(self._id)
        except MlflowException as error:
            raise ConfigError(f"mlflow cannot end its run: {error}", key="Engine.loggers") from error
