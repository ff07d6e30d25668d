"""GLUE's metrics, computed by scikit-learn and SciPy (extra ``glue``)."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Sequence

import numpy as np

from ppfleetx.config.errors import DataError

_ACCURACY_AND_F1 = ("MRPC", "QQP")


def require_libraries() -> None:
    """Raise DataError when a library is missing; imports nothing."""
    missing = [name for name in ("sklearn", "scipy") if importlib.util.find_spec(name) is None]
    if missing:
        raise DataError(
            f"GLUE's metrics need {' and '.join(missing)}, which is not installed: "
            "pip install 'ppfleetx[glue]'"
        )


def glue_metrics(task: str, outputs: np.ndarray, labels: Sequence[float]) -> dict[str, float]:
    """The task's metrics, each between -1 and 1; an undefined correlation (all predictions equal) is 0.

    Args:
        task: name of a GLUE task.
        outputs: ``[examples, classes]`` scores, or ``[examples, 1]`` predicted numbers.
        labels: class numbers, or scores.
    """
    truth = np.asarray(labels)
    if task == "STSB":
        return _correlations(outputs[:, 0], truth)
    from sklearn.metrics import accuracy_score, f1_score, matthews_corrcoef

    predicted, truth = outputs.argmax(axis=1), truth.astype(np.int64)
    if task == "CoLA":
        return {"mcc": float(matthews_corrcoef(truth, predicted))}
    accuracy = {"accuracy": float(accuracy_score(truth, predicted))}
    if task in _ACCURACY_AND_F1:
        accuracy["f1"] = float(f1_score(truth, predicted, zero_division=0.0))
    return accuracy


def _correlations(predicted: np.ndarray, truth: np.ndarray) -> dict[str, float]:
    import warnings

    from scipy.stats import pearsonr, spearmanr

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of constant input, whose correlation is not defined
        found = {
            "pearson": float(pearsonr(predicted, truth)[0]) if len(truth) > 1 else math.nan,
            "spearman": float(spearmanr(predicted, truth)[0]) if len(truth) > 1 else math.nan,
        }
    return {name: 0.0 if math.isnan(value) else value for name, value in found.items()}
