"""Continue prompts with a checkpoint.

CHECKPOINT is the directory of a run, of one of its checkpoints, of Hugging Face or of FleetX. How text is
continued is what the checkpoint says; -o Generation.KEY=VALUE changes it. Prompts are also taken from
Generation.prompt and .prompt_file.
"""

from __future__ import annotations

import argparse

from ppfleetx.cli.launching import add_launch_arguments
from ppfleetx.cli.model_arguments import add_model_arguments, job_of

EXAMPLES = """\
examples:
  ppfleetx generate output "Once upon a time"
  ppfleetx generate output/epoch_0_step_500 -o Generation.temperature=0.7 -o Generation.max_dec_len=50 "def "
  ppfleetx generate -c FILE -o Engine.save_load.ckpt_dir=output -o Generation.prompt_file=prompts.txt
"""
INTERMIXED = True


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command line."""
    add_model_arguments(parser)
    add_launch_arguments(parser)
    parser.add_argument("prompt", nargs="*", metavar="PROMPT", help="texts to continue")
    parser.add_argument("--output", metavar="FILE", help="also write prompts and results as jsonl")


def run(args: argparse.Namespace) -> None:
    """Generate; results go to standard output."""
    from ppfleetx.commands.generate import run as run_program
    from ppfleetx.commands.resolve_model import override

    prompts = [override("Generation.prompt", args.prompt, "PROMPT")] if args.prompt else []
    with job_of(args, *prompts) as job:
        run_program(job.config, job.overrides, args.output)
