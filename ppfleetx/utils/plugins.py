"""Import plugins: the user's modules that register callbacks, optimizers, layers and so on. ``--plugin`` or
``PPFLEETX_PLUGINS`` names them. They are imported before the configuration is validated."""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from collections.abc import Iterable
from pathlib import Path

from ppfleetx.config.errors import ConfigError, UserError
from ppfleetx.config.registry import PLUGINS_VARIABLE, imported_plugins
from ppfleetx.utils.device_support import expected_device
from ppfleetx.utils.process_env import loading_paddle, prepare_process


def import_named_plugins(names: Iterable[str] = ()) -> None:
    """Import the modules in ``names`` and in the environment variable ``PPFLEETX_PLUGINS`` (separated by
    commas), and set the variable to all of them. Raises ConfigError if an import fails."""
    from_environment = [name.strip() for name in os.environ.get(PLUGINS_VARIABLE, "").split(",")]
    wanted = [name for name in dict.fromkeys((*from_environment, *names)) if name]
    for name in wanted:
        if name not in imported_plugins:
            _import(name, "--plugin" if name not in from_environment else PLUGINS_VARIABLE)
    if wanted:
        os.environ[PLUGINS_VARIABLE] = ",".join(wanted)


def _import(name: str, named_by: str) -> None:
    if name.endswith(".py") or name.startswith(".") or os.sep in name:
        module = Path(name).stem.strip(".") or "my_parts"
        raise ConfigError(
            f"must be the name of a module, such as {module}, not a path. Modules are looked for in the "
            "current directory, in PYTHONPATH and among installed packages",
            key=named_by,
            value=name,
        )
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.append(here)  # like `python -m`, but last, so that it hides no other module
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
        raise _import_error(error, name, named_by) from error
    except (Exception, SystemExit) as error:  # a plugin that was written as a script may call sys.exit
        raise _import_error(error, name, named_by) from error
    imported_plugins[name] = None


def _import_error(error: BaseException, name: str, named_by: str) -> ConfigError:
    """Return the error for a plugin that cannot be imported. The message says what is wrong, and in which
    line."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if "importlib" not in frame.filename and frame.filename != __file__]
    where = f" ({own[-1].filename}:{own[-1].lineno})" if own else ""
    if isinstance(error, SyntaxError) and error.filename:
        where = f" ({error.filename}:{error.lineno})"
    said = str(error).partition("\n")[0]
    return ConfigError(
        f"the plugin cannot be imported: {type(error).__name__}: {said}{where}", key=named_by, value=name
    )
