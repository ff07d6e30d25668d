"""The committed table of kernels: comparing it with recordings, and writing it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ppfleetx.nn import fused_ops
from ppfleetx.utils.gpu_operators import TABLE, used_kernels
from tests.helpers.ranks import Pools
from tests.operators.scenarios import CASES, SMALL, Scenario

DEVICES = ("gpu", "npu")
Used = tuple[str, str]  # kernel, element type
PROMPTS = ["the cat", "and", "the other hat and the ca"]


def write_runs(directory: Path, small: Iterable[str] = ()) -> dict[str, Path]:
    """Write a run of each style with a YAML file that generates from it, and the quantized models
    ``small``."""
    from ppfleetx.data.tokenizer.tokenizer import train_tokenizer
    from tests.generation.conftest import LLAMA_STYLE, write_run

    tokenizer, runs = train_tokenizer(["the cat and the hat and the other cat"] * 3, 300), {}
    for style, keys in {"gpt2": {}, "llama": LLAMA_STYLE}.items():
        run = runs[style] = directory / style
        run.mkdir()
        write_run(run, tokenizer, **keys)
        _generates(run / "generation.yaml", run / "run", json.loads((run / "generation.yaml").read_text()))
    return runs | {name: _quantized(directory, *name.split()) for name in small}


def _quantized(directory: Path, style: str, way: str) -> Path:
    """A quantized model with widths that the GPU's kernel for 8-bit weights supports."""
    from ppfleetx.commands.checkpoint_verbs import Quantize
    from ppfleetx.commands.quantize import quantize
    from tests.compress.runs import MODELS, write_run

    place, source = directory / f"{style} {way}", directory / f"{style} wide"
    if not source.exists():
        widths = {"hidden_size": 64, "num_attention_heads": 4, "num_query_groups": 4, "ffn_hidden_size": 128}
        write_run(source, {**MODELS[f"{style}_style"], **widths})
    step = quantize(Quantize(checkpoint=str(source), output=str(place), **SMALL[way]))
    base = {"_base_": str(step / "config.yaml"), "Model": {"module": "GPTGenerationModule"}}
    _generates(place / "generation.yaml", place, base)
    return place


def _generates(file: Path, checkpoint: Path, sections: dict[str, Any]) -> None:
    sections["Generation"] = {"prompt": PROMPTS, "max_dec_len": 10, "seed": 7}
    sections["Engine"] = {"save_load": {"ckpt_dir": str(checkpoint)}}
    file.write_text(json.dumps(sections))


def arguments_of(scenario: Scenario, runs: dict[str, Path]) -> dict[str, Any]:
    """The scenario's arguments, with the directory of its run if it needs one."""
    if scenario.case != "kernels_of_generation":
        return scenario.arguments
    return {**scenario.arguments, "directory": str(runs[scenario.arguments["directory"]])}


def named() -> set[Used]:
    """Kernels of fused operators, which a CPU cannot run; the product names them."""
    return {
        (kernel, dtype) for row in fused_ops.TABLE.values() for kernel in row.kernels for dtype in row.types
    }


def exported(pools: Pools, directory: Path, timeout: float) -> set[Used]:
    """Kernels of exported programs of both styles."""
    from tests.deploy.exports import STYLES, make_export

    found: set[Used] = set()
    for name, style in STYLES.items():
        made = make_export(directory / f"export-{name}", style)
        (path,) = {str(file).removesuffix(".json") for file in Path(made.directory).glob("model.json")}
        (kernels,) = pools(1).run(CASES + "kernels_of_export", timeout=timeout, path=path)
        found |= set(map(tuple, kernels))
    return found


def unknown(found: Iterable[Used]) -> list[str]:
    """Messages about kernels that are not in the table, or are in it but do not exist on a GPU."""
    kernels, told = used_kernels(), []
    for name, dtype in sorted(set(found)):
        entry = kernels.get(name)
        if entry is None or dtype not in entry.used:
            told.append(f"{name} {dtype} is not in the table")
        elif dtype not in entry.gpu:
            told.append(f"{name} {dtype} is not registered for GPUs")
    return told


def write(found: Iterable[Used], registries: Mapping[str, Path | None]) -> list[str]:
    """Add the kernels that were found to the table, with the kernels of each device (``gpu``, ``npu``) from
    its registry or the table. Return the kernels that no GPU has, which are not written."""
    content = json.loads(TABLE.read_text(encoding="utf-8"))
    given = {device: json.loads(file.read_text("utf-8")) for device, file in registries.items() if file}
    kernels, missing = content["kernels"], []
    for device, registry in given.items():
        for name, entry in kernels.items():
            entry[device] = sorted(registry.get(name, [] if device == "npu" else entry[device]))
    for name, dtype in sorted(set(found)):
        new = {"used": [], **{device: sorted(given.get(device, {}).get(name, [])) for device in DEVICES}}
        entry = kernels.get(name, new)
        if dtype not in entry["gpu"]:
            missing.append(f"{name} {dtype}")
            continue
        entry["used"] = sorted({*entry["used"], dtype})
        kernels[name] = entry
    lines = [f"    {json.dumps(name)}: {json.dumps(kernels[name])}" for name in sorted(kernels)]
    head = [
        f"  {json.dumps(key)}: {json.dumps(value)}," for key, value in content.items() if key != "kernels"
    ]
    text = "\n".join(["{", *head, '  "kernels": {', ",\n".join(lines), "  }", "}", ""])
    TABLE.write_text(text, encoding="utf-8")
    return missing
