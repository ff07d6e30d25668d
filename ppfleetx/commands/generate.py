"""Implement ``ppfleetx generate``, which continues prompts with a checkpoint."""

from __future__ import annotations

import gc
import json
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ppfleetx.checkpoint.model_only import find_tokenizer_dir
from ppfleetx.checkpoint.resolve_checkpoint import named_checkpoint, resolve_checkpoint
from ppfleetx.commands.initialize import start_with
from ppfleetx.config.errors import ConfigError, naming
from ppfleetx.config.loader import load_config
from ppfleetx.config.reading.overrides import Setting
from ppfleetx.config.reading.tree import is_argument
from ppfleetx.config.sections.root import RunConfig
from ppfleetx.core.engine.device_errors import OF_GENERATION, explained_device_errors
from ppfleetx.core.engine.training_watchdog import GENERATION_DIR, watched
from ppfleetx.data.tokenizer.tokenizer import Tokenizer, check_tokenizer
from ppfleetx.distributed.coordination import gather, joint_errors
from ppfleetx.resilience.progress import PROGRESS
from ppfleetx.utils.log import get_logger
from ppfleetx.utils.output_files import atomic_write, writing

if TYPE_CHECKING:
    from ppfleetx.checkpoint.reader import Checkpoint
    from ppfleetx.commands.model_verbs import Generate
    from ppfleetx.distributed.context import ParallelContext
    from ppfleetx.generation.generator import Generation, Generator, TextGenerator
    from ppfleetx.generation.speculative_decoding import Assistant

_SEARCHED_BYTES = 1 << 24  # bytes of an existing output file to search for earlier results
DEFAULT_PROMPT = "The first thing she saw when she opened the window was"


def run(options: Generate) -> None:
    with options.job() as job:
        run_loaded(job.load(), options.output)


def run_loaded(cfg: RunConfig, output: str | None = None) -> None:
    """Generate continuations of the prompts that a loaded configuration names. Prints the results and, if
    ``output`` is given, writes them to this JSON Lines file."""
    check_plan(cfg)
    check_options(cfg)
    prompts = read_prompts(cfg)
    check_checkpoint(cfg)
    if output is not None:
        check_output(Path(output))
    cfg, ctx = start_with(cfg)
    generate(cfg, ctx, prompts, output)


def generate(cfg: RunConfig, ctx: ParallelContext, prompts: Sequence[str], output: str | None = None) -> None:
    """Load the checkpoint, and generate continuations of the prompts, which are split among the data-parallel
    ranks. Rank 0 prints all results in order and, if ``output`` is given, writes them to this JSON Lines
    file."""
    with watched(cfg, ctx, GENERATION_DIR), explained_device_errors(cfg, ctx, OF_GENERATION):
        generator = load_generator(cfg, ctx)
        PROGRESS.is_past_start = True
        if _is_followed(cfg, ctx, prompts):
            results = [_print_as_it_comes(generator, prompts[0], cfg)]
        else:
            results = continue_together(generator, cfg, ctx, prompts)
        write_generations(ctx, output, prompts, results)


def continue_together(
    generator: TextGenerator, cfg: RunConfig, ctx: ParallelContext, prompts: Sequence[str]
) -> list[list[Generation]]:
    """Generate continuations of the prompts, which are split among the data-parallel ranks. All ranks must
    call this function. Each rank gets the results of all prompts, in order. Rank 0 prints the results."""
    start, end = (len(prompts) * rank // ctx.data_size for rank in (ctx.data_rank, ctx.data_rank + 1))
    results: list[list[Generation]] = []
    # Tensor-parallel ranks communicate here. They have the same prompts and so raise the same errors.
    with joint_errors(ctx, name_ranks=False):
        results = generator.generate(
            prompts[start:end], cfg.Generation, seed=cfg.Global.seed, first_prompt=start
        )
    speaks = ctx.rank_on("mp") == 0
    parts = gather(ctx, [[asdict(one) for one in each] for each in results] if speaks else [])
    results = [[_generation(one) for one in each] for part in parts for each in part]
    for prompt, generations in zip(prompts, results, strict=True) if ctx.is_main else ():
        print(f"Prompt: {prompt}")
        for generation in generations:
            print(f"Generation: {prompt}{generation.text}\n", flush=True)
    return results


def _generation(fields: dict[str, Any]) -> Generation:
    """Rebuild a :class:`Generation` from the dictionary that another rank sent."""
    from ppfleetx.generation.generator import Generation
    from ppfleetx.generation.sampling import TokenScore

    scores = fields["logprobs"]
    if scores is not None:
        scores = tuple(TokenScore(**{**one, "top": tuple(map(tuple, one["top"]))}) for one in scores)
    return Generation(**{**fields, "ids": tuple(fields["ids"]), "logprobs": scores})


def check_plan(cfg: RunConfig) -> None:
    """Raise ConfigError if generation cannot run under the configured plan, for example with a pipeline."""
    plan = cfg.plan
    cut = [name for name, degree in (("pp_degree", plan.pp), ("sep_degree", plan.sep)) if degree > 1]
    if cut:
        whole = " ".join(f"-o Distributed.{name}=1" for name in cut)
        why = (
            f"runs neither in pipelines nor over split sequences; run the same {plan.world_size} processes "
            f"with {whole} -o Distributed.dp_degree={plan.dp * plan.pp * plan.sep}: a checkpoint of any plan "
            "can be loaded"
        )
        raise cfg.error(f"Distributed.{cut[0]}", f"generation {why}")
    if plan.sequence_parallel:
        why = "generation does not split sequences; give -o Model.sequence_parallel=False (results are equal)"
        raise cfg.error("Model.sequence_parallel", why)
    # Experts cannot be spread over data-parallel ranks, because these finish after different numbers of
    # tokens.
    if plan.mp % (plan.ep * plan.emp):
        raise cfg.error(
            "Distributed.ep_degree",
            f"generation divides experts among tensor-parallel ranks alone (mp_degree {plan.mp}); give -o "
            "Distributed.ep_degree=1 -o Distributed.expert_mp_degree=null: a checkpoint of any plan can be "
            "loaded",
        )
    if plan.sharding > 1 and plan.sharding_stage == 3:
        key = "Distributed.sharding.sharding_stage"
        raise cfg.error(
            key,
            f"generation needs the whole model in each data-parallel rank; give -o {key}=1, or split the "
            "model with Distributed.mp_degree",
        )


def check_options(cfg: RunConfig) -> None:
    """Raise ConfigError if the command line sets a ``Generation`` key that the decoding strategy does not
    use."""
    arguments = [key for key, place in cfg.origins.items() if is_argument(place)]
    given = [key.removeprefix("Generation.") for key in arguments if key.startswith("Generation.")]
    if (unread := cfg.Generation.first_unused_option(given)) is not None:
        key, strategy = unread
        raise cfg.error(
            f"Generation.{key}",
            f"only {strategy} reads it, and the strategy is {cfg.Generation.decode_strategy}: give -o "
            f"Generation.decode_strategy={strategy} too",
        )


def check_checkpoint(cfg: RunConfig) -> None:
    """Check, without reading tensors, that the configured checkpoint can generate text.

    Raises:
        ConfigError: the model is a classifier.
        CheckpointError: ``Engine.save_load.ckpt_dir`` holds no checkpoint.
    """
    if not cfg.Model.task.continues_text:
        raise cfg.error(
            "Model.module",
            "a classifier has no next token; only models that continue text can be used here (GPTModule, "
            "GPTGenerationModule)",
        )
    resolve_checkpoint(named_checkpoint(cfg))


def check_output(path: Path, *, mark: bytes = b'"generations": [') -> None:
    """Raise ConfigError if results cannot be written to ``path``. An existing file may be replaced only if it
    is empty or holds earlier results. Results are recognized by the bytes ``mark``."""
    if path.is_dir():
        reason = "it is a directory; name a file"
    elif not path.parent.is_dir():
        reason = f"there is no directory {path.parent}"
    elif path.exists() and not path.is_file():
        reason = "it is a device or a pipe; name a file"
    elif path.is_file() and not _may_be_replaced(path, mark):
        reason = "a file is there that holds something else than results; name another or remove it"
    elif not os.access(path.parent, os.W_OK | os.X_OK):
        reason = f"no file may be created in {path.parent}"
    else:
        return
    raise ConfigError(f"cannot be written: {reason}", key="--output", value=str(path))


def _may_be_replaced(path: Path, mark: bytes) -> bool:
    try:
        with path.open("rb") as file:
            beginning = file.read(_SEARCHED_BYTES)
    except OSError:
        return False
    return not beginning or mark in beginning


def load_generator(cfg: RunConfig, ctx: ParallelContext, tokenizer: Tokenizer | None = None) -> Generator:
    """Load the checkpoint ``Engine.save_load.ckpt_dir``, and return a text generator with its model. The
    model's tokenizer is loaded too, unless the caller passes it as ``tokenizer``."""
    from ppfleetx.commands.train import build_runner, find_weights
    from ppfleetx.generation.generator import Generator
    from ppfleetx.nn.cpu_ops import ops as cpu_ops

    if ctx.device == "cpu":
        cpu_ops.note_if_missing()
    start = find_weights(cfg, ctx)
    tokenizer = tokenizer or find_tokenizer(cfg, start.checkpoint)
    check_tokenizer(tokenizer, cfg.Model.vocab_size, is_trained=True)
    runner = build_runner(cfg, ctx, train=False)
    start.restore_weights(runner, cfg.Model)
    generator = Generator(runner.model, cfg.Model, tokenizer, ctx.groups.get("mp"), assistants_for(cfg))
    gc.collect()
    gc.freeze()  # exclude objects that live as long as the process from garbage collection
    return generator


def assistants_for(cfg: RunConfig) -> Callable[[str], Assistant]:
    """Return a function that loads the assistant (draft) model for speculative decoding. Its argument is the
    value of ``Generation.assistant_model``. Each process holds the whole assistant model."""

    def load(place: str) -> Assistant:
        from ppfleetx.commands.resolve_model import resolve_model
        from ppfleetx.distributed.context import ParallelContext
        from ppfleetx.generation.speculative_decoding import Assistant

        with ExitStack() as stack, naming("Generation.assistant_model", place):
            found = resolve_model(place, stack)
            device = Setting("Global.device", cfg.Global.device, "Generation.assistant_model")
            its = load_config(found.config, found.overrides([device]))
            loaded = load_generator(its, ParallelContext.single(its.Global.device))
            return Assistant(loaded.next_token_model, loaded.max_positions, loaded.tokenizer)

    return load


def find_tokenizer(cfg: RunConfig, checkpoint: Checkpoint) -> Tokenizer:
    """Load the tokenizer that ``Data.tokenizer`` names, or else the tokenizer that is stored in or beside the
    checkpoint. The stored one is also used if the run was moved and the directory in ``Data.tokenizer`` no
    longer exists. Raises ConfigError if there is no tokenizer."""
    from ppfleetx.data.build import load_tokenizer

    named, stored = cfg.Data.tokenizer, find_tokenizer_dir(checkpoint.path)
    is_gone = named is not None and named.dir is not None and not Path(named.dir).exists()
    names_none = named is None or not (named.dir or named.tokenizer_file or named.vocab_file)
    written_in = Path(cfg.origins.get("Data.tokenizer.dir", "").rpartition(":")[0])
    lies_beside = written_in.resolve().parent == checkpoint.path.resolve().parent
    if stored is not None and (names_none or (is_gone and lies_beside)):
        tokenizer = Tokenizer.load(stored, eod_token=None if named is None else named.eos_token)
        if is_gone:
            get_logger().warning(f"there is no {named.dir} (Data.tokenizer.dir); {stored} is used")
    else:
        tokenizer = load_tokenizer(cfg)
    if tokenizer is None:
        raise ConfigError(
            f"names no tokenizer, and none is stored with checkpoint {checkpoint.path}; "
            "give -o Data.tokenizer.dir=DIR",
            key="Data.tokenizer",
        )
    trained_with = checkpoint.manifest.fingerprints.get("tokenizer")
    if trained_with and trained_with != tokenizer.fingerprint:
        get_logger().warning(
            f"{tokenizer.place} is not the tokenizer checkpoint {checkpoint.path} was trained with"
        )
    return tokenizer


def read_prompts(cfg: RunConfig) -> list[str]:
    """Return the configured prompts. They come from the file ``Generation.prompt_file`` if that is set. Else
    they are ``Generation.prompt``, or :data:`DEFAULT_PROMPT` if neither is set.

    Each line of a ``.jsonl`` file is a JSON string, or an object with a string under ``prompt``. In any other
    file, and in ``-`` (standard input), each line is a prompt. Blank lines are skipped.
    """
    if cfg.Generation.prompt_file is not None:
        return _prompts_of_file(cfg, cfg.Generation.prompt_file)
    prompt, place = cfg.Generation.prompt, cfg.origins.get("Generation.prompt")
    if prompt is None:
        if place is not None and is_argument(place):  # -o Generation.prompt= (or "", to a shell)
            rule = "is empty; give a prompt, or leave the option out for the one built in"
            raise ConfigError(rule, key="Generation.prompt", place=place)
        prompt = DEFAULT_PROMPT
    prompts = [prompt] if isinstance(prompt, str) else list(prompt)
    for number, one in enumerate(prompts):
        key = "Generation.prompt" if isinstance(prompt, str) else f"Generation.prompt.{number}"
        _refuse_blank(one, key, cfg.origins.get(key) or place)
    return prompts


def _refuse_blank(prompt: str, key: str, place: str | None) -> None:
    if not prompt.strip():
        raise ConfigError("is blank; a prompt needs text to go on from", key=key, value=prompt, place=place)


def _prompts_of_file(cfg: RunConfig, name: str) -> list[str]:
    key = "Generation.prompt_file"
    if name == "-" and cfg.plan.world_size > 1:
        raise cfg.error(
            key, f"the {cfg.plan.world_size} processes of a job have no standard input; give a file"
        )
    try:
        if name == "-":
            text = "" if sys.stdin is None else sys.stdin.read()  # None if it is closed
        else:
            text = Path(name).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise cfg.error(key, f"cannot be read: {why}") from error
    # Not splitlines(): a prompt may hold form feeds and other separators that do not end a line.
    lines = [(number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    if not lines:
        raise cfg.error(key, "holds no prompt")
    if not name.endswith(".jsonl"):
        return [line.removesuffix("\r") for _, line in lines]
    return [_prompt_of(line, f"{name}:{number}") for number, line in lines]


def _prompt_of(line: str, place: str) -> str:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"is not JSON: {error}", key="Generation.prompt_file", place=place) from error
    prompt = value.get("prompt") if isinstance(value, dict) else value
    if not isinstance(prompt, str):
        raise ConfigError(
            'needs a text, or an object with a text under "prompt"',
            key="Generation.prompt_file",
            place=place,
        )
    _refuse_blank(prompt, "Generation.prompt_file", place)
    return prompt


def _is_followed(cfg: RunConfig, ctx: ParallelContext, prompts: Sequence[str]) -> bool:
    return (
        ctx.world_size == 1
        and sys.stdout.isatty()
        and len(prompts) == 1
        and cfg.Generation.num_return_sequences == 1
    )


def _print_as_it_comes(generator: Generator, prompt: str, cfg: RunConfig) -> list[Generation]:
    print(f"Prompt: {prompt}\nGeneration: {prompt}", end="", flush=True)

    def on_text(_prompt: int, _copy: int, piece: str) -> None:
        print(piece, end="", flush=True)

    [generations] = generator.generate([prompt], cfg.Generation, seed=cfg.Global.seed, on_text=on_text)
    print("\n", flush=True)
    return generations


def write_generations(
    ctx: ParallelContext,
    output: str | None,
    prompts: Sequence[str],
    results: Sequence[Sequence[Generation]],
) -> None:
    """Write prompts and results to the JSON Lines file ``output``, unless ``output`` is None. All ranks must
    call this function; rank 0 writes. If the file cannot be written, every rank raises ConfigError."""
    if output is None:
        return
    lines = []
    for prompt, generations in zip(prompts, results, strict=True) if ctx.is_main else ():
        found = [asdict(one) for one in generations]
        found = [{key: value for key, value in one.items() if value is not None} for one in found]
        lines.append(json.dumps({"prompt": prompt, "generations": found}, ensure_ascii=False) + "\n")
    with joint_errors(ctx, name_ranks=False):
        if ctx.is_main:
            with writing("--output", output), atomic_write(output, "w") as file:
                file.writelines(lines)
