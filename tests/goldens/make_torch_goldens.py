"""Files that PyTorch wrote, for tests that must run without it.

    python tests/goldens/make_torch_goldens.py

writes torch/ (the two file layouts) and megatron/ (classic checkpoints with the weights of hf_gpt2.npz and
hf_llama.npz, in float16) beside this file. Made with torch 2.13.0 (CPU). The Megatron layouts are laid out
here from Hugging Face's weights by their own definition, without using the reader under test.
"""

from __future__ import annotations

import argparse
import enum
import shutil
import sys
import types
from pathlib import Path

import numpy as np
import torch
from make_hf_goldens import stored

HERE = Path(__file__).parent


def tensors() -> dict[str, torch.Tensor]:
    numbers = torch.arange(24, dtype=torch.float32).reshape(4, 6)
    return {
        "float32": numbers,
        "transposed": numbers.t(),
        "part": numbers[1:3, 2:5],
        "bfloat16": (numbers / 7).bfloat16(),
        "float16": (numbers / 7).half(),
        "int64": torch.arange(5),
        "bool": torch.tensor([True, False]),
        "scalar": torch.tensor(2.5),
        "empty": torch.zeros(0, 3),
        "parameter": torch.nn.Parameter(numbers[:2] + 1),
    }


def write_torch() -> None:
    directory = HERE / "torch"
    directory.mkdir(exist_ok=True)
    tree = {"tensors": tensors(), "namespace": argparse.Namespace(layers=3), "numbers": np.arange(3.0)}
    torch.save(tree, directory / "zip.bin")
    torch.save(tree, directory / "legacy.bin", _use_new_zipfile_serialization=False)
    torch.save(torch.nn.Linear(2, 2), directory / "module.bin")
    expected = {
        name: (t.detach().view(torch.int16) if t.dtype == torch.bfloat16 else t.detach()).numpy()
        for name, t in tensors().items()
    }
    np.savez(directory / "expected.npz", **expected)


def weights(name: str) -> tuple[dict, dict[str, torch.Tensor]]:
    config, found = stored(name)
    return config, {key: torch.from_numpy(value).half() for key, value in found.items()}


def save(path: Path, tree: dict) -> None:
    path.mkdir(parents=True)
    torch.save(tree, path / "model_optim_rng.pt")


def stub_enum() -> enum.Enum:
    """A member of an enumeration whose class will not be there when the file is read."""
    module = types.ModuleType("megatron.model.enums")
    module.AttnMaskType = enum.Enum("AttnMaskType", {"padding": 1, "causal": 2}, module=module.__name__)
    sys.modules["megatron"] = types.ModuleType("megatron")
    sys.modules["megatron.model"] = types.ModuleType("megatron.model")
    sys.modules[module.__name__] = module
    return module.AttnMaskType.causal


def gpt2_layer(w: dict, index: int, heads: int, version: int, tp: int, rank: int) -> dict[str, torch.Tensor]:
    """One layer of one tensor-parallel rank under the names of Megatron's own transformer."""
    theirs = f"transformer.h.{index}."
    attention = "self_attention" if version else "attention"

    def qkv(kind: str) -> torch.Tensor:
        fused = w[f"{theirs}attn.c_attn.{kind}"]
        fused = fused.t() if fused.ndim == 2 else fused
        dim = fused.shape[0] // 3 // heads
        by_kind = fused.reshape(3, heads, dim, *fused.shape[1:])  # q, k, v
        mine = by_kind[:, rank * heads // tp : (rank + 1) * heads // tp]
        if version == 3:
            mine = mine.transpose(0, 1)
        elif version == 1:
            mine = mine.permute(1, 2, 0, *range(3, mine.ndim))
        return mine.reshape(-1, *fused.shape[1:]).clone()

    def cut(name: str, dim: int) -> torch.Tensor:
        return w[theirs + name].t().chunk(tp, dim)[rank].clone()

    return {
        "input_layernorm.weight": w[f"{theirs}ln_1.weight"],
        "input_layernorm.bias": w[f"{theirs}ln_1.bias"],
        f"{attention}.query_key_value.weight": qkv("weight"),
        f"{attention}.query_key_value.bias": qkv("bias"),
        f"{attention}.dense.weight": cut("attn.c_proj.weight", 1),
        f"{attention}.dense.bias": w[f"{theirs}attn.c_proj.bias"],
        "post_attention_layernorm.weight": w[f"{theirs}ln_2.weight"],
        "post_attention_layernorm.bias": w[f"{theirs}ln_2.bias"],
        "mlp.dense_h_to_4h.weight": cut("mlp.c_fc.weight", 0),
        "mlp.dense_h_to_4h.bias": w[f"{theirs}mlp.c_fc.bias"].chunk(tp)[rank].clone(),
        "mlp.dense_4h_to_h.weight": cut("mlp.c_proj.weight", 1),
        "mlp.dense_4h_to_h.bias": w[f"{theirs}mlp.c_proj.bias"],
    }


def padded_vocabulary(table: torch.Tensor, rows: int) -> torch.Tensor:
    padding = torch.full((rows - table.shape[0], table.shape[1]), 9.0, dtype=table.dtype)
    return torch.cat([table, padding])


def write_gpt2_parallel() -> None:
    """Two tensor-parallel and two pipeline ranks, checkpoint version 3, options in a namespace."""
    config, w = weights("hf_gpt2")
    heads, tp, pp = config["n_head"], 2, 2
    run = HERE / "megatron" / "gpt2_tp2_pp2"
    args = argparse.Namespace(
        num_layers=config["n_layer"], hidden_size=config["n_embd"], num_attention_heads=heads,
        ffn_hidden_size=4 * config["n_embd"], max_position_embeddings=config["n_positions"],
        vocab_size=config["vocab_size"], padded_vocab_size=256, layernorm_epsilon=1e-5,
        bias_gelu_fusion=True, position_embedding_type="learned_absolute", normalization="LayerNorm",
        attn_mask_type=stub_enum(), tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp,
    )  # fmt: skip
    table = padded_vocabulary(w["transformer.wte.weight"], 256)
    per_stage = config["n_layer"] // pp
    for rank in range(tp):
        words = {"weight": table.chunk(tp)[rank].clone()}
        for stage in range(pp):
            encoder = {
                f"layers.{local}.{name}": value
                for local in range(per_stage)
                for name, value in gpt2_layer(w, stage * per_stage + local, heads, 3, tp, rank).items()
            }
            model: dict = {"language_model": {"encoder": encoder}}
            if stage == 0:
                positions = {"weight": w["transformer.wpe.weight"]}
                model["language_model"]["embedding"] = {
                    "word_embeddings": words,
                    "position_embeddings": positions,
                }
            else:
                encoder["final_layernorm.weight"] = w["transformer.ln_f.weight"]
                encoder["final_layernorm.bias"] = w["transformer.ln_f.bias"]
                model["word_embeddings_for_head"] = words
            tree = {"args": args, "checkpoint_version": 3.0, "iteration": 7, "model": model}
            save(run / "iter_0000007" / f"mp_rank_{rank:02d}_{stage:03d}", tree)
    (run / "latest_checkpointed_iteration.txt").write_text("7")


def write_gpt2_releases() -> None:
    """One rank, old names, no options; checkpoint versions 0 (unnumbered) and 1."""
    config, w = weights("hf_gpt2")
    for version in (0, 1):
        run = HERE / "megatron" / f"gpt2_v{version}"
        encoder = {
            f"layers.{index}.{name}": value
            for index in range(config["n_layer"])
            for name, value in gpt2_layer(w, index, config["n_head"], version, 1, 0).items()
        }
        encoder["final_layernorm.weight"] = w["transformer.ln_f.weight"]
        encoder["final_layernorm.bias"] = w["transformer.ln_f.bias"]
        embedding = {
            "word_embeddings": {"weight": padded_vocabulary(w["transformer.wte.weight"], 128)},
            "position_embeddings": {"weight": w["transformer.wpe.weight"]},
        }
        tree: dict = {"model": {"language_model": {"embedding": embedding, "transformer": encoder}}}
        if version:
            tree["checkpoint_version"] = float(version)
        save(run / "release" / "mp_rank_00", tree)
        (run / "latest_checkpointed_iteration.txt").write_text("release")


def write_llama_core() -> None:
    """Grouped keys, SwiGLU and an untied head over two ranks, under the names of Megatron core."""
    config, w = weights("hf_llama")
    tp, groups = 2, config["num_key_value_heads"]
    dim = config["hidden_size"] // config["num_attention_heads"]
    args = argparse.Namespace(
        num_layers=config["num_hidden_layers"], hidden_size=config["hidden_size"],
        num_attention_heads=config["num_attention_heads"], group_query_attention=True,
        num_query_groups=groups, kv_channels=dim, ffn_hidden_size=config["intermediate_size"],
        max_position_embeddings=config["max_position_embeddings"], vocab_size=config["vocab_size"],
        norm_epsilon=1e-5, swiglu=True, position_embedding_type="rope", rotary_percent=1.0,
        rotary_base=10000, normalization="RMSNorm", add_bias_linear=False,
        untie_embeddings_and_output_weights=True, hidden_dropout=0.0, attention_dropout=0.0,
    )  # fmt: skip
    for rank in range(tp):
        model = {
            "embedding.word_embeddings.weight": w["model.embed_tokens.weight"],
            "output_layer.weight": w["lm_head.weight"],
        }
        model = {key: padded_vocabulary(t, 128).chunk(tp)[rank].clone() for key, t in model.items()}
        for index in range(config["num_hidden_layers"]):
            theirs, ours = f"model.layers.{index}.", f"decoder.layers.{index}."
            q, k, v = (
                w[f"{theirs}self_attn.{part}_proj.weight"].reshape(groups, -1, config["hidden_size"])
                for part in "qkv"
            )
            fused = torch.cat([q, k, v], dim=1).chunk(tp)[rank].reshape(-1, config["hidden_size"])
            gate, up = (w[f"{theirs}mlp.{part}_proj.weight"].chunk(tp)[rank] for part in ("gate", "up"))
            model |= {
                f"{ours}self_attention.linear_qkv.layer_norm_weight": w[f"{theirs}input_layernorm.weight"],
                f"{ours}self_attention.linear_qkv.weight": fused.clone(),
                f"{ours}self_attention.linear_proj.weight": w[f"{theirs}self_attn.o_proj.weight"]
                .chunk(tp, 1)[rank]
                .clone(),
                f"{ours}mlp.linear_fc1.layer_norm_weight": w[f"{theirs}post_attention_layernorm.weight"],
                f"{ours}mlp.linear_fc1.weight": torch.cat([gate, up]),
                f"{ours}mlp.linear_fc2.weight": w[f"{theirs}mlp.down_proj.weight"].chunk(tp, 1)[rank].clone(),
            }
        model["decoder.final_layernorm.weight"] = w["model.norm.weight"]
        tree = {"args": args, "checkpoint_version": 3.0, "iteration": 3, "model": model}
        save(HERE / "megatron" / "llama_tp2" / "iter_0000003" / f"mp_rank_{rank:02d}", tree)


def main() -> None:
    shutil.rmtree(HERE / "megatron", ignore_errors=True)
    write_torch()
    write_gpt2_parallel()
    write_gpt2_releases()
    write_llama_core()


if __name__ == "__main__":
    main()
