"""Plugins: modules of the user's own that register callbacks, optimizers, layers and the like.

Whoever starts a program names them, with ``--plugin`` or in ``PPFLEETX_PLUGINS``. They are imported once,
before the configuration is validated, so that it may use the names that they register.
"""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from collections.abc import Iterable
from pathlib import Path

from ppfleetx.config.errors import ConfigError, UserError
from ppfleetx.config.plugins import VARIABLE, imported_plugins, note_plugin
from ppfleetx.utils.devices import expected_device
from ppfleetx.utils.process_env import loading_paddle, prepare_process


def import_named_plugins(names: Iterable[str] = ()) -> None:
    """Import the plugins of ``PPFLEETX_PLUGINS`` (module names with commas between them) and ``names``.

    Processes that this one starts find all of them in the variable.

    Raises:
        ConfigError: one cannot be imported.
    """
    from_environment = [name.strip() for name in os.environ.get(VARIABLE, "").split(",")]
    wanted = [name for name in dict.fromkeys((*from_environment, *names)) if name]
    for name in wanted:
        if name not in imported_plugins():
            _import(name, "--plugin" if name not in from_environment else VARIABLE)
    if wanted:
        os.environ[VARIABLE] = ",".join(wanted)


def _import(name: str, named_by: str) -> None:
    """Import one plugin. It may import Paddle, which then finds the process as our programs prepare it."""
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.append(here)  # as `python -m` does; last, so that nothing of Python's is hidden
    if "paddle" not in sys.modules:
        prepare_process(device=expected_device("auto"))
    try:
        with loading_paddle():
            importlib.import_module(name)
    except UserError as error:
        raise ConfigError(f"the plugin cannot be used: {error}", key=named_by, value=name) from error
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(f"{error.name}.")):
            raise ConfigError(
                "there is no such module. It is looked for in the current directory, in PYTHONPATH and among "
                "installed packages",
                key=named_by,
                value=name,
            ) from error
        raise _failed(error, name, named_by) from error
    except (Exception, SystemExit) as error:  # a script that was meant to be run may call sys.exit
        raise _failed(error, name, named_by) from error
    note_plugin(name)


def _failed(error: BaseException, name: str, named_by: str) -> ConfigError:
    """A sentence in the place of a traceback: what was raised, and where."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if "importlib" not in frame.filename and frame.filename != __file__]
    where = f" ({own[-1].filename}:{own[-1].lineno})" if own else ""
    if isinstance(error, SyntaxError) and error.filename:
        where = f" ({error.filename}:{error.lineno})"
    said = str(error).partition("\n")[0]
    return ConfigError(
        f"the plugin cannot be imported: {type(error).__name__}: {said}{where}", key=named_by, value=name
    )
