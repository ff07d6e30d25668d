"""Implement ``ppfleetx infer``, which continues prompts with an exported model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from ppfleetx.checkpoint.config_and_tokenizer import portable_model
from ppfleetx.commands.generate import check_output, continue_together, read_prompts, write_generations
from ppfleetx.commands.initialize import start_with
from ppfleetx.commands.resolve_model import ONE_SEQUENCE, as_replicas
from ppfleetx.config.errors import ConfigError
from ppfleetx.config.loader import load_config
from ppfleetx.config.reading.parse import Sections, model_in
from ppfleetx.config.registries import ACTIVATIONS, ARCHITECTURES, MODULES, NORMS, POSITIONS
from ppfleetx.config.sections.root import GenerationConfig, RunConfig
from ppfleetx.config.validate import section_of
from ppfleetx.deploy.export_dir import (
    ExportManifest,
    check_generation,
    check_inference,
    check_onednn,
    open_export,
)
from ppfleetx.distributed.coordination import joint_errors
from ppfleetx.utils.device_support import expected_device
from ppfleetx.utils.launcher_env import world_size
from ppfleetx.utils.log import get_logger

if TYPE_CHECKING:
    from ppfleetx.commands.model_verbs import Infer


_SHAPE_KEYS = ("vocab_size", "hidden_size", "num_layers", "num_attention_heads", "max_position_embeddings")


def run(options: Infer) -> None:
    """Generate continuations of the prompts with the exported model. The prompts are split among the
    processes. Rank 0 prints and writes all results in order."""
    if options.export is None and options.config is None:
        raise ConfigError("give EXPORT, the directory of an exported model, or -c FILE")
    config = options.config or _config_of(options.export)
    cfg = load_config(config, [*options.override, *options.settings()])
    cfg, notes = as_replicas(cfg, world_size())
    prompts = read_prompts(cfg)
    check_inference(cfg, expected_device(cfg.Global.device))
    directory, manifest = _open(cfg.Inference.model_dir, cfg.origins.get("Inference.model_dir"))
    cfg = cfg.model_copy(update={"Generation": merge_settings(manifest.generation, cfg)})
    check_generation(cfg.Generation, cfg.origins)
    if cfg.Inference.onednn:
        check_onednn(cfg.Generation, manifest.vocab_size, cfg.origins)
    if options.output is not None:
        check_output(Path(options.output))
    cfg, ctx = start_with(_without_checkpoint(cfg))
    for note in notes:
        get_logger().info(f"NOTE: {note}")
    _warn_of_differences(directory, manifest, cfg)
    from ppfleetx.deploy.inference_engine import InferenceEngine

    with joint_errors(ctx, name_ranks=False):
        engine = InferenceEngine(cfg.Inference, device=ctx.device)
    write_generations(ctx, options.output, prompts, continue_together(engine, cfg, ctx, prompts))


def _open(export: str, place: str | None) -> tuple[Path, ExportManifest]:
    try:
        return open_export(export, verify=False)
    except ConfigError as error:
        raise ConfigError(error.rule, key=error.key, value=export, place=place) from error


def _config_of(export: str) -> Sections:
    _, manifest = _open(export, "EXPORT")
    # Parts of a plugin are in the exported program; running it does not need the plugin.
    parts = {registry.key: registry for registry in (ARCHITECTURES, NORMS, ACTIVATIONS, POSITIONS, MODULES)}
    model = {
        key: value
        for key, value in portable_model(manifest.model).items()
        if f"Model.{key}" not in parts or value in parts[f"Model.{key}"].names()
    }
    return Sections({**ONE_SEQUENCE, "Model": model}, model_in(export))


def merge_settings(exported: dict[str, Any], cfg: RunConfig) -> GenerationConfig:
    """Return the generation settings for an exported model. ``exported`` are the settings that are stored
    with the model. Keys of ``cfg.Generation`` that the user set take precedence over them. Keys that are set
    in neither have their defaults.
    """
    written = cfg.Generation.model_dump(exclude_unset=True)
    try:
        return section_of(GenerationConfig, {**exported, **written})
    except ConfigError as error:
        raise ConfigError(
            f"does not fit the settings of the export ({exported}): {error}", key="Generation"
        ) from error


def _without_checkpoint(cfg: RunConfig) -> RunConfig:
    """Return the configuration without the paths of the original weights, which an exported model does not
    need."""
    # Model.lora.base is the path of frozen weights. Neither path needs to exist on the machine that uses the
    # export.
    save_load = cfg.Engine.save_load.model_copy(update={"ckpt_dir": None})
    return cfg.changed("Engine", save_load=save_load).changed("Model", lora=None)


def _warn_of_differences(directory: Path, manifest: ExportManifest, cfg: RunConfig) -> None:
    here = cfg.Model.model_dump(mode="json")
    other = [name for name in _SHAPE_KEYS if manifest.model.get(name, here[name]) != here[name]]
    if other:
        keys = ", ".join(f"Model.{name}" for name in other)
        get_logger().warning(f"the exported model in {directory} has its own {keys}, not the configuration's")
