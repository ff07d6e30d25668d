"""Means over the steps since the last report."""

from __future__ import annotations

from ppfleetx.core.engine.run import StepRecord


class Window:
    """Sums step records and answers with means.

    ``ips_total`` is the tokens per second of the whole job, ``ips`` those of one data rank.
    """

    def __init__(self) -> None:
        self._steps = self._tokens = 0
        self._seconds = self._reader_seconds = 0.0
        self._data_size = 1

    def add(self, record: StepRecord) -> None:
        """Count a step."""
        self._steps += 1
        self._tokens += record.num_tokens
        self._seconds += record.batch_cost
        self._reader_seconds += record.reader_cost
        self._data_size = record.data_size

    @property
    def batch_cost(self) -> float:
        """Seconds per step."""
        return self._seconds / self._steps

    @property
    def reader_cost(self) -> float:
        """Seconds per step spent waiting for data."""
        return self._reader_seconds / self._steps

    @property
    def speed(self) -> float:
        """Steps per second."""
        return self._steps / self._seconds

    @property
    def ips_total(self) -> float:
        """Tokens per second of the whole job."""
        return self._tokens / self._seconds

    @property
    def ips(self) -> float:
        """Tokens per second of one data rank."""
        return self.ips_total / self._data_size
