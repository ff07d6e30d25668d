"""Keep the list of plugins that the user has named, and refuse a configuration that needs other plugins.

Only the command line and the environment can name a plugin, because importing it runs its code.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable

from ppfleetx.config.errors import ConfigError
from ppfleetx.config.reading.tree import Node

VARIABLE = "PPFLEETX_PLUGINS"

_imported: dict[str, None] = {}


def note_plugin(module: str) -> None:
    """Record that the user has named the plugin ``module`` and that it has been imported."""
    _imported[module] = None


def imported_plugins() -> tuple[str, ...]:
    """The names of the imported plugins, in the order in which the user gave them."""
    return tuple(_imported)


def refuse_unnamed(tree: Node) -> None:
    """Raise ConfigError if ``Global.plugins`` lists a plugin that has not been imported."""
    section = tree.value.get("Global") if isinstance(tree.value, dict) else None
    wanted = section.value.get("plugins") if section and isinstance(section.value, dict) else None
    if wanted is None or not isinstance(wanted.value, list):
        return
    names = [item.value for item in wanted.value if isinstance(item.value, str)]
    missing = [name for name in names if name not in _imported and name not in sys.modules]
    if missing:
        raise ConfigError(
            f"this configuration needs {plugins_text(missing)}, which runs code that is not part of this "
            f"program. If you trust it, name it yourself: {' '.join(f'--plugin {name}' for name in missing)} "
            f"(or {VARIABLE}={','.join(missing)}). A file alone never makes code run.",
            key="Global.plugins",
            value=names,
            place=wanted.place,
        )


def plugins_text(names: Iterable[str]) -> str:
    """Write plugin names for a message: ``the plugin a`` or ``the plugins a, b``."""
    listed = list(names)
    return f"the plugin{'s' if len(listed) > 1 else ''} {', '.join(listed)}"
