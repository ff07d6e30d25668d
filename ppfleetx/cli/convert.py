"""Convert checkpoints: Hugging Face, FleetX and Megatron-LM in; ppfleetx and Hugging Face out.

  --from hf        GPT-2, Llama, Mistral, Qwen2, Qwen3 and GPT-NeoX of Hugging Face, Llamas of PaddleNLP and
                   PaddleFormers (safetensors, pytorch_model.bin or model_state.pdparams, sharded or not)
  --from fleetx    model.pdparams, alone or in rank directories (tensor and pipeline parallel)
  --from megatron  classic mp_rank_XX[_YYY]/model_optim_rng.pt, weights only
  --from ppfleetx  anything Engine.save_load.ckpt_dir accepts

Tensors are converted one at a time. Pickled files are read without running anything in them.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from ppfleetx.config.errors import ConfigError
from ppfleetx.utils.cli import add_plugin_argument


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command line."""
    add = parser.add_argument
    add("--from", dest="source", required=True, choices=["hf", "fleetx", "megatron", "ppfleetx"])
    add("--to", dest="target", required=True, choices=["ppfleetx", "hf"])
    add("--input", required=True, metavar="DIR", help="what to convert; with --from hf also hf:ORG/NAME or "
        "hf:ORG/NAME@REVISION, a model of the Hugging Face hub")  # fmt: skip
    add("--output", required=True, metavar="DIR", help="a new or empty directory")
    add("--config", metavar="YAML", help="configuration whose Model section describes the network, where the "
        "source does not (always with --from fleetx)")  # fmt: skip
    add("-o", "--override", action="append", default=[], metavar="Section.key=value",
        help="replace one value of --config; may be given many times")  # fmt: skip
    add("--dtype", choices=["float32", "float16", "bfloat16"], help="element type (as in the source)")
    add("--tokenizer", metavar="DIR", help="tokenizer files to put with the weights (the source's)")
    add("--merge", action="store_true", help="ppfleetx to ppfleetx: one rank directory, optimizer included")
    add("--plan", metavar="mp=N,pp=M", help="ppfleetx to ppfleetx: rank directories of this plan")
    add("--check-logits", action="store_true",
        help="compare logits of source and result on random tokens (Hugging Face on one side)")  # fmt: skip
    add("--transformers", metavar="PYTHON", help="with --check-logits: ask transformers too, with this "
        "interpreter, which has torch and transformers")  # fmt: skip
    add_plugin_argument(parser)


def run(args: argparse.Namespace) -> None:
    """Do what was asked for."""
    plan = None if args.plan is None else parse_plan(args.plan)
    from ppfleetx.config.plan import ParallelPlan
    from ppfleetx.conversion.convert import Conversion, check_logits, convert, load_model_section
    from ppfleetx.conversion.hub import local_directory
    from ppfleetx.utils.log import configure_logging
    from ppfleetx.utils.plugins import import_named_plugins

    configure_logging()
    import_named_plugins()  # what the environment names; --plugin has imported its own
    if args.override and args.config is None:
        raise ConfigError("-o changes values of --config, which is not given")
    job = Conversion(
        args.source,
        args.target,
        local_directory(args.input) if args.source == "hf" else Path(args.input),
        Path(args.output),
        model=None if args.config is None else load_model_section(args.config, tuple(args.override)),
        dtype=args.dtype,
        merge=args.merge,
        plan=None if plan is None else ParallelPlan(**plan),
        tokenizer=None if args.tokenizer is None else Path(args.tokenizer),
    )
    if args.check_logits and "hf" not in (args.source, args.target):
        raise ConfigError("--check-logits needs Hugging Face's format on one side")
    if args.transformers is not None and not args.check_logits:
        raise ConfigError("--transformers belongs to --check-logits")
    written = convert(job)
    print(f"written: {written}")
    if args.check_logits:
        difference = check_logits(job, written, python_with_transformers=args.transformers)
        rounded = "" if args.dtype is None else f", with the source's weights in {args.dtype}"
        print(f"logits of source and result differ by at most {difference:.3g}{rounded}")


def parse_plan(text: str) -> dict[str, int]:
    """`mp=2,pp=2` as numbers. Raises ConfigError."""
    degrees = {}
    for part in text.split(","):
        axis, _, degree = part.strip().partition("=")
        if axis not in ("mp", "pp") or not degree.isdigit() or int(degree) < 1:
            raise ConfigError(f"--plan {text}: give mp=N, pp=M or both; the other axes cut no tensor")
        degrees[axis] = int(degree)
    return degrees
