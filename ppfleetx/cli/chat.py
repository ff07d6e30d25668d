"""Talk with a model, in the terminal or over a pipe.

CHECKPOINT is the directory of a run, of one of its checkpoints, of Hugging Face or of FleetX. Its chat
template is used; how answers are made is what the checkpoint says, and -o Generation.KEY=VALUE changes it.
Each line is a message; /help lists the commands.
"""

from __future__ import annotations

import argparse

from ppfleetx.cli.model_arguments import add_model_arguments, job_of

EXAMPLES = """\
examples:
  ppfleetx chat output
  ppfleetx chat output --system "You are brief." -o Generation.temperature=0.7 -o Generation.max_dec_len=200
  echo "What is a list?" | ppfleetx chat output
"""
INTERMIXED = True


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command line."""
    add_model_arguments(parser)
    parser.add_argument("--system", metavar="TEXT", help="the system message")
    parser.add_argument("--template", metavar="NAME", help="one of the model's chat templates, or a file")


def run(args: argparse.Namespace) -> None:
    """Talk until the input ends."""
    from ppfleetx.commands.chat import run as run_program

    with job_of(args) as job:
        run_program(job.config, job.overrides, system=args.system, template=args.template)
