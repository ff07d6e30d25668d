"""The verb ``train``."""

from __future__ import annotations

import os
from dataclasses import dataclass

from ppfleetx.commands.launching import TrainingOptions
from ppfleetx.commands.options import ConfigOptions, switch


@dataclass(frozen=True, kw_only=True)
class Train(TrainingOptions, ConfigOptions):
    """Pretrain or finetune the model of a YAML configuration."""

    examples = """\
examples:
  ppfleetx train -c gpt/pretrain_gpt_345M_single_card -o Data.Train.dataset.input_dir=data/my_text_document
  ppfleetx train -c FILE --nproc 8
  ppfleetx train -c FILE --max-steps 2000
  ppfleetx train -c FILE --nproc 8 --nnodes 2 --master 10.0.0.1:8765
"""
    check: bool = switch("validate the configuration, print plan, parameters and batch arithmetic, and exit")

    @property
    def is_launched(self) -> bool:
        """``--check`` looks at the configuration in this process."""
        return not self.check and super().is_launched

    def run(self) -> None:
        """Train, or with ``--check`` only look at the configuration."""
        from ppfleetx.commands.finetune import up_to

        overrides = [*self.override]
        if self.max_steps is not None:
            overrides += up_to(self.max_steps, self.config, overrides)
        if self.check:
            from ppfleetx.commands.check import check
            from ppfleetx.commands.start_process import world_size

            size = self.num_processes or world_size(os.environ)
            check(self.config, overrides, world_size=size if size > 1 else None)
            return
        from ppfleetx.commands.start_process import start_process

        cfg, ctx = start_process(self.config, overrides, reads=("Train", "Eval"))
        from ppfleetx.commands.training import train

        train(cfg, ctx)
