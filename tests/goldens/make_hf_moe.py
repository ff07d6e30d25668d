"""Tiny checkpoints with mixtures of experts, computed by transformers in float64.

usage: python make_hf_moe.py

writes hf_moe.npz, and hf_moe_generate.json: for each model prompts and the tokens that follow them in
float64, without an end token. Prompts where another token was nearly as likely are left out. The latter was
made with transformers 5.23.0 and torch 2.13.0. Keys in hf_moe.npz, for each model NAME:
  NAME/config              config.json as a JSON string (as save_pretrained writes it)
  NAME/w/<tensor>          weights under the names of the checkpoint on disk, float16 values (exact)
  NAME/input_ids, labels, attention_mask   labels are -100 where not counted; the shift is the model's own
  NAME/logits              float64, with the attention mask
  NAME/ce                  mean cross entropy over counted labels
  NAME/g/<tensor>          gradients of routers, one expert, the shared expert's gate (names on disk), of
                           ce + router_aux_loss_coef * the balancing loss where the model has one
"""

import contextlib
import importlib
import json
import tempfile
import types
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.numpy import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

HERE = Path(__file__).parent
COMMON = {
    "vocab_size": 61,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
SPEC = {
    "mixtral": {
        "model_type": "mixtral", "seed": 11, "intermediate_size": 40, "num_local_experts": 4,
        "num_experts_per_tok": 2, "router_aux_loss_coef": 0.02, "output_router_logits": True,
        "rope_theta": 1e4,
    },
    "qwen2_moe": {
        "model_type": "qwen2_moe", "seed": 12, "num_hidden_layers": 3, "intermediate_size": 48,
        "moe_intermediate_size": 16, "shared_expert_intermediate_size": 24, "num_experts": 6,
        "num_experts_per_tok": 3, "norm_topk_prob": False, "mlp_only_layers": [1], "decoder_sparse_step": 1,
        "router_aux_loss_coef": 0.05, "output_router_logits": True, "qkv_bias": True,
    },
    "qwen3_moe": {
        "model_type": "qwen3_moe", "seed": 13, "num_hidden_layers": 3, "intermediate_size": 48,
        "head_dim": 16, "moe_intermediate_size": 16, "num_experts": 8, "num_experts_per_tok": 3,
        "norm_topk_prob": True, "decoder_sparse_step": 2, "mlp_only_layers": [], "router_aux_loss_coef": 0.03,
        "output_router_logits": True,
    },
    "olmoe": {
        "model_type": "olmoe", "seed": 16, "num_hidden_layers": 2, "intermediate_size": 24, "num_experts": 6,
        "num_experts_per_tok": 3, "norm_topk_prob": False, "router_aux_loss_coef": 0.04,
        "output_router_logits": True,
    },
    "deepseek_v3": {
        "model_type": "deepseek_v3", "seed": 14, "num_hidden_layers": 3, "num_key_value_heads": 4,
        "intermediate_size": 48, "moe_intermediate_size": 16, "n_routed_experts": 8, "n_shared_experts": 2,
        "num_experts_per_tok": 3, "n_group": 4, "topk_group": 2, "first_k_dense_replace": 1,
        "routed_scaling_factor": 2.5, "norm_topk_prob": True, "kv_lora_rank": 16, "q_lora_rank": 24,
        "qk_rope_head_dim": 8, "qk_nope_head_dim": 12, "v_head_dim": 10, "num_nextn_predict_layers": 0,
    },
    "glm4_moe": {
        "model_type": "glm4_moe", "seed": 15, "num_hidden_layers": 2, "intermediate_size": 48, "head_dim": 16,
        "moe_intermediate_size": 16, "n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2,
        "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "routed_scaling_factor": 1.5,
        "norm_topk_prob": True, "use_qk_norm": True, "partial_rotary_factor": 0.5,
    },
}  # fmt: skip
PROMPTS, NEW = 20, 24
CLOSEST = 1e-3  # of the two highest logits
ROUTERS = ("gate.weight", "shared_expert_gate.weight")


class _Torch64(types.ModuleType):
    float32 = torch.float64
    float = torch.float64

    def __getattr__(self, name):
        return getattr(torch, name)


@contextlib.contextmanager
def double(modules):
    """Let what computes in float32 whatever the weights' type compute in float64: model code writes
    ``torch.float32``, ``torch.float`` and ``.float()``, which mean float64 within."""
    fake = _Torch64("torch64")
    saved = [(m, m.torch) for m in modules if hasattr(m, "torch")]
    plain = torch.Tensor.float
    before = torch.get_default_dtype()
    try:
        for m, _ in saved:
            m.torch = fake
        torch.Tensor.float = lambda self: self.double()
        torch.set_default_dtype(torch.float64)
        yield
    finally:
        for m, t in saved:
            m.torch = t
        torch.Tensor.float = plain
        torch.set_default_dtype(before)


def build(spec):
    spec = {**COMMON, **spec}
    seed, kind = spec.pop("seed"), spec.pop("model_type")
    batch, length = spec.pop("batch", 2), spec.pop("length", 13)
    config = AutoConfig.for_model(kind, **spec)
    config._attn_implementation = "sdpa"
    config._experts_implementation = "eager"
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config).double()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        tensors = [
            *model.named_parameters(),
            *((n, b) for n, b in model.named_buffers() if "correction_bias" in n),
        ]
        for name, value in sorted(tensors):
            size = 0.05 if "correction_bias" in name else 0.35 if "gate.weight" in name else 0.12
            new = torch.randn(value.shape, generator=generator, dtype=torch.float32) * size
            if name.endswith("norm.weight") or "layernorm" in name:
                new = 1 + new
            value.copy_(new.half().double())
    ids = torch.randint(3, config.vocab_size, (batch, length), generator=generator)
    mask = torch.ones_like(ids)
    mask[-1, length - 4 :] = 0  # padding on the right
    labels = ids.clone()
    labels[mask == 0] = -100
    labels[0, :3] = -100  # a prompt
    ids[mask == 0] = 0
    return model, config, ids, labels, mask


def on_disk(model):
    """Tensors under the names that they have in files, and config.json."""
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        files = [load_file(file) for file in Path(folder).glob("*.safetensors")]
        config = json.loads((Path(folder) / "config.json").read_text())
    return {name: tensor for file in files for name, tensor in file.items()}, config


def run(spec):
    model, config, ids, labels, mask = build(spec)
    module = importlib.import_module(type(model).__module__)
    rope = importlib.import_module("transformers.modeling_rope_utils")
    loss_utils = importlib.import_module("transformers.loss.loss_utils")
    out = {}
    disk, stored = on_disk(model)
    stored["dtype"] = "float32"
    out["config"] = np.array(json.dumps(stored, sort_keys=True))
    for key, value in disk.items():
        half = value.astype(np.float16)
        assert (half.astype(np.float64) == value).all(), key
        out["w/" + key] = half
    # rotary tables of float64
    with double([module, rope, loss_utils]):
        for m in model.modules():
            if hasattr(m, "inv_freq"):
                fresh = type(m)(config)
                m.inv_freq = fresh.inv_freq.double()
                if hasattr(m, "original_inv_freq"):
                    m.original_inv_freq = m.inv_freq
        result = model(input_ids=ids, attention_mask=mask, labels=labels)
        aux = getattr(result, "aux_loss", None)
        loss = result.loss
        ce = loss - (config.router_aux_loss_coef * aux if aux is not None else 0.0)
        loss.backward()
        assert loss.dtype == torch.float64 and result.logits.dtype == torch.float64
    out["input_ids"], out["labels"], out["attention_mask"] = (
        t.numpy().astype(np.int32) for t in (ids, labels, mask)
    )
    out["logits"] = result.logits.detach().numpy()
    out["ce"] = np.float64(ce.item())
    # gradients under the names on disk: save a copy of the model whose weights are the gradients
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(p.grad if p.grad is not None else torch.zeros_like(p))
    grads, _ = on_disk(model)
    last = max(int(k.split(".")[2]) for k in grads if ".experts." in k)
    for key, value in grads.items():
        if key.endswith(ROUTERS) or (f"layers.{last}." in key and ".experts.1." in key):
            out["g/" + key] = value
    return out


def model_of(name: str, stored: Any) -> torch.nn.Module:
    with tempfile.TemporaryDirectory() as folder:
        weights = {key.split("/w/")[1]: stored[key] for key in stored.files if key.startswith(f"{name}/w/")}
        save_file({key: w.astype(np.float32) for key, w in weights.items()}, f"{folder}/model.safetensors")
        (Path(folder) / "config.json").write_text(str(stored[f"{name}/config"]))
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()
    model.config._experts_implementation = "eager"  # grouped products have no float64
    return model


@torch.no_grad()
def continued(model: torch.nn.Module, prompt: list[int]) -> list[int] | None:
    ids = torch.tensor([prompt])
    for _ in range(NEW):
        logits, tokens = model(input_ids=ids, use_cache=False).logits[0, -1].topk(2)
        if logits[0] - logits[1] < CLOSEST:
            return None
        ids = torch.cat([ids, tokens[:1].unsqueeze(0)], dim=1)
    return ids[0, len(prompt) :].tolist()


def write_continuations() -> None:
    stored = np.load(HERE / "hf_moe.npz")
    rng, result = np.random.RandomState(7), {}
    for name in sorted(SPEC):
        model, rows = model_of(name, stored), []
        while len(rows) < PROMPTS:
            prompt = rng.randint(3, COMMON["vocab_size"], rng.randint(1, 13)).tolist()
            following = continued(model, prompt)
            if following is not None:
                rows.append([prompt, following])
        result[name] = rows
    (HERE / "hf_moe_generate.json").write_text(json.dumps(result) + "\n")


def main():
    torch.set_num_threads(1)
    everything = {f"{name}/{k}": v for name, spec in SPEC.items() for k, v in run(spec).items()}
    np.savez_compressed(HERE / "hf_moe.npz", **everything)
    write_continuations()


if __name__ == "__main__":
    main()
