"""The base class of all configuration sections."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Self

from pydantic import BaseModel, ConfigDict, model_validator

from ppfleetx.config.errors import RuleError


class Section(BaseModel):
    """A section of the configuration, with typed fields. Unknown keys are errors, and values are immutable.

    The string below each field documents it, and becomes its text in ``docs/config.md``.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())

    def violations(self) -> Iterator[RuleError]:
        """Yield an error for each broken rule that involves several fields of the section. Loading raises the
        first error.

        Subclasses override this method.
        """
        return iter(())

    @model_validator(mode="after")
    def _hold_rules(self) -> Self:
        for violation in self.violations():
            raise violation
        return self
