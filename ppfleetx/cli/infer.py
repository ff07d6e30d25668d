"""Continue prompts with an exported model.

EXPORT is what `ppfleetx export` wrote; with -c FILE it is Inference.model_dir. Prompts are also taken from
Generation.prompt and .prompt_file.
"""

from __future__ import annotations

import argparse
from contextlib import ExitStack

from ppfleetx.cli.launching import add_launch_arguments
from ppfleetx.config.errors import ConfigError
from ppfleetx.config.reading.files import MadeFile, model_in
from ppfleetx.utils.cli import add_config_arguments

EXAMPLES = """\
examples:
  ppfleetx infer exported "Once upon a time"
  ppfleetx infer -c gpt/inference_gpt_345M_single_card -o Inference.model_dir=exported
"""
INTERMIXED = True


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command line."""
    parser.add_argument("export", nargs="?", metavar="EXPORT", help="directory of an exported model")
    parser.add_argument("prompt", nargs="*", metavar="PROMPT", help="texts to continue")
    add_config_arguments(parser, required=False)
    add_launch_arguments(parser)
    parser.add_argument("--output", metavar="FILE", help="also write prompts and results as jsonl")


def run(args: argparse.Namespace) -> None:
    """Answer the prompts with the exported model."""
    from ppfleetx.commands.infer import run as run_program
    from ppfleetx.commands.resolve_model import override

    if args.export is None and args.config is None:
        raise ConfigError("give EXPORT, the directory of an exported model, or -c FILE")
    overrides = list(args.override)
    if args.export is not None:
        overrides.append(override("Inference.model_dir", args.export, "EXPORT"))
    if args.prompt:
        overrides.append(override("Generation.prompt", args.prompt, "PROMPT"))
    with ExitStack() as stack:
        config = args.config or _config_of(args.export, stack)
        run_program(config, overrides, args.output)


def _config_of(export: str, stack: ExitStack) -> MadeFile:
    """A configuration with the network that the export says."""
    from ppfleetx.checkpoint.documents import portable_model
    from ppfleetx.commands.resolve_model import ONE_SEQUENCE, write_config
    from ppfleetx.deploy.export_dir import open_export

    _, manifest = open_export(export, verify=False)
    sections = {**ONE_SEQUENCE, "Model": portable_model(manifest.model)}
    return write_config(sections, stack, model_in(export))
