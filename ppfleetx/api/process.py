"""This process made ready for a model: Paddle loaded as our programs load it, and its device chosen."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ppfleetx.commands.start_process import expected_device
from ppfleetx.config.config_notes import not_supported_reasons
from ppfleetx.config.errors import ConfigError
from ppfleetx.config.sections.root import RunConfig
from ppfleetx.utils.process_env import import_paddle, prepare_process

if TYPE_CHECKING:
    from ppfleetx.distributed.context import ParallelContext


def ready(cfg: RunConfig) -> ParallelContext:
    """Load Paddle, if that has not been done, and choose the device. Random generators stay as they are.

    Raises:
        ConfigError: there is no such device, or the model cannot run there.
    """
    place = cfg.origins.get("Global.device")
    device = expected_device(cfg.Global.device, place)
    if reasons := not_supported_reasons(cfg, device):
        raise ConfigError("this model cannot run here:\n  " + "\n  ".join(reasons))
    prepare_process(device=device)
    import_paddle()
    import paddle

    from ppfleetx.distributed.context import ParallelContext
    from ppfleetx.distributed.device import choose_device

    chosen = choose_device(cfg.Global.device, place)
    paddle.set_device(chosen)
    return ParallelContext.single(chosen)
