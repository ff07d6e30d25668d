"""In a rank: any function of these tests while the reference device has other options."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

from tests.device.reference import Device


def call(function: str, options: Mapping[str, int], **arguments: Any) -> Any:
    """``function`` ("module:function") with ``options`` of ``plugin/options.h``."""
    module, _, name = function.partition(":")
    with Device().having(options):
        return getattr(importlib.import_module(module), name)(**arguments)
