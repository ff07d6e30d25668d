"""Routers of mixtures of experts alone, in float64: choices, weights, losses, gradients.

usage: python make_moe_router.py

Shared by all cases (tokens are in the order [sequence position][sample], t = s * B + b):
  x [T, H], w [E, H], bias [E] (for choosing only), r [T, E] random cotangent, pad [T] True where padding
Case NAME:
  NAME/options   JSON
  NAME/choice [T, k] descending by the score that chose
  NAME/weights [T, E], 0 where not chosen or dropped
  NAME/gx, gw    gradients of sum(weights * r) to x and w
Losses, each with gradients ``.../gx`` and ``.../gw`` of the loss alone (coefficient 1):
  loss/NAME      see the table in ``losses``
Bias updates: bias/counts, bias/sign (rate).
"""

import json
import math
from pathlib import Path

import numpy as np
import torch

HERE = Path(__file__).parent
SPEC = {
    "seed": 21,
    "s": 12,
    "b": 2,
    "h": 16,
    "e": 8,
    "k": 3,
    "rate": 1e-3,
    "cases": {
        "softmax_topk_norm": {"score": "softmax", "norm": True, "k": 2},  # Mixtral, Qwen3-MoE
        "softmax_topk": {"score": "softmax", "norm": False, "k": 3},  # Qwen2-MoE
        "topk_softmax": {"score": "topk_softmax", "k": 3},  # Megatron without pre-softmax
        # Megatron pre-softmax
        "softmax_topk_scaled": {"score": "softmax", "norm": False, "k": 2, "scale": 2.5},
        "sigmoid_norm": {"score": "sigmoid", "norm": True, "k": 3, "scale": 1.0},
        "sigmoid_top1_hf": {"score": "sigmoid", "norm": True, "k": 1, "scale": 1.5},
        "sigmoid_top1_megatron": {"score": "sigmoid", "norm": False, "k": 1, "scale": 1.5},
        "deepseek_v3": {
            "score": "sigmoid", "norm": True, "k": 3, "scale": 2.5, "bias": True,
            "groups": 4, "group_topk": 2, "best": 2,
        },
        "deepseek_v2": {
            "score": "softmax", "norm": False, "k": 3, "scale": 16.0, "groups": 4, "group_topk": 2, "best": 1,
        },
        # SwitchGate without noise
        "switch_paddle": {"score": "softmax", "norm": False, "k": 1, "linear_bias": True},
        "capacity_probs": {"score": "softmax", "norm": True, "k": 2, "capacity": 1.0, "policy": "probs"},
        "capacity_position": {
            "score": "softmax", "norm": True, "k": 2, "capacity": 0.75, "policy": "position",
        },
        "capacity_pad": {
            "score": "softmax", "norm": True, "k": 2, "capacity": 1.25, "policy": "probs", "pad": True,
        },
    },
}  # fmt: skip


def chosen(values, k):
    return torch.topk(values, k, dim=-1).indices


def route(logits, bias, o):
    """Weights [T, E], choice [T, k]."""
    tokens, experts = logits.shape
    k, kind = o["k"], o["score"]
    if kind == "topk_softmax":
        index = chosen(logits, k)
        weights = torch.softmax(logits.gather(1, index), -1)
    else:
        scores = torch.softmax(logits, -1) if kind == "softmax" else torch.sigmoid(logits)
        choose = scores.detach() + (bias if o.get("bias") else 0.0)
        if o.get("groups"):
            per = choose.view(tokens, o["groups"], -1)
            best = per.topk(o["best"], -1).values.sum(-1)
            keep = torch.zeros_like(best).scatter(1, best.topk(o["group_topk"], -1).indices, 1.0).bool()
            choose = per.masked_fill(~keep[..., None], -math.inf).reshape(tokens, experts)
        index = chosen(choose, k)
        weights = scores.gather(1, index)
        if o.get("norm"):
            weights = weights / (weights.sum(-1, keepdim=True) + (0.0 if kind == "softmax" else 1e-20))
    weights = weights * o.get("scale", 1.0)
    dense = torch.zeros_like(logits).scatter(1, index, weights)
    kept = torch.zeros_like(logits).scatter(1, index, 1.0).bool()
    if "capacity" in o:
        limit = math.ceil(tokens * k / experts * o["capacity"])
        if limit <= tokens:
            if o["policy"] == "probs":
                rank = torch.topk(dense.detach(), limit, dim=0).indices
                within = torch.zeros_like(dense).scatter(0, rank, 1.0).bool()
            else:  # the first tokens that chose it
                within = kept & (kept.long().cumsum(0) <= limit)
            kept = within if o.get("pad") and o["policy"] == "probs" else kept & within
        dense = dense * kept
    return dense, index


def switch(probs, counts, total, k):
    """E * sum_e f_e P_e with f = counts / (k total), P = sum of probs / total."""
    return probs.shape[1] * ((counts / (k * total)) * (probs.sum(0) / total)).sum()


def losses(logits, k, s, b, pad):
    """name -> scalar. Counts and choices are those of plain top-k of the softmax."""
    probs = torch.softmax(logits, -1)
    tokens, experts = probs.shape
    hit = torch.zeros_like(probs).scatter(1, chosen(probs.detach(), k), 1.0)
    valid = (~pad).double()[:, None]
    good = float(valid.sum())
    out = {}
    out["hf"] = experts * ((hit.sum(0) / tokens) * (probs.sum(0) / tokens)).sum()
    out["hf_masked"] = experts * (((hit * valid).sum(0) / good) * ((probs * valid).sum(0) / good)).sum()
    out["megatron"] = switch(probs, hit.sum(0), tokens, k)
    out["megatron_masked"] = switch(probs * valid, (hit * valid).sum(0), good, k)
    per = [switch(probs.view(s, b, -1)[:, j], hit.view(s, b, -1)[:, j].sum(0), s, k) for j in range(b)]
    out["megatron_sequence"] = torch.stack(per).mean()
    hit1 = torch.zeros_like(probs).scatter(1, chosen(probs.detach(), 1), 1.0)
    out["gshard_top1_counts"] = experts * (hit1.mean(0) * probs.mean(0)).sum()
    sig = torch.sigmoid(logits)
    share = sig / (sig.sum(-1, keepdim=True) + 1e-20)
    hit_s = torch.zeros_like(probs).scatter(1, chosen(sig.detach(), k), 1.0)
    out["megatron_sigmoid"] = switch(share, hit_s.sum(0), tokens, k)
    per = [switch(share.view(s, b, -1)[:, j], hit_s.view(s, b, -1)[:, j].sum(0), s, k) for j in range(b)]
    out["deepseek_v3_sequence"] = torch.stack(per).mean()
    z = torch.logsumexp(logits, -1) ** 2
    out["z"] = z.mean()
    out["z_masked"] = (z * valid[:, 0]).sum() / good
    return out


def main():
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)
    g = torch.Generator().manual_seed(SPEC["seed"])
    s, b, h, e, k = (SPEC[n] for n in "sbhek")
    tokens = s * b

    def random(*shape, size=1.0):
        return (torch.randn(*shape, generator=g, dtype=torch.float32) * size).half().double()

    x, w, bias, r = random(tokens, h), random(e, h, size=0.4), random(e, size=0.08), random(tokens, e)
    lin = random(e, size=0.3)
    w = w + torch.linspace(0.15, -0.15, e)[:, None].float().half().double()  # some experts are liked more
    w = w.half().double()
    pad = torch.zeros(s, b, dtype=torch.bool)
    pad[s - 3 :, b - 1] = True
    pad = pad.reshape(-1)
    out = {
        "x": x,
        "w": w,
        "bias": bias,
        "linear_bias": lin,
        "r": r,
        "pad": pad,
        "shape": torch.tensor([s, b, h, e, k]),
    }
    for name, o in SPEC["cases"].items():
        xs, ws = x.clone().requires_grad_(), w.clone().requires_grad_()
        logits = xs @ ws.T + (lin if o.get("linear_bias") else 0.0)
        weights, index = route(logits, bias, o)
        (weights * r).sum().backward()
        out |= {
            f"{name}/choice": index.int(),
            f"{name}/weights": weights,
            f"{name}/gx": xs.grad,
            f"{name}/gw": ws.grad,
            f"{name}/options": np.array(json.dumps(o)),
        }
    for name in losses(x @ w.T, k, s, b, pad):
        xs, ws = x.clone().requires_grad_(), w.clone().requires_grad_()
        loss = losses(xs @ ws.T, k, s, b, pad)[name]
        loss.backward()
        out |= {f"loss/{name}": loss, f"loss/{name}/gx": xs.grad, f"loss/{name}/gw": ws.grad}
    counts = torch.zeros(e).index_add(
        0, chosen(torch.sigmoid(x @ w.T) + bias, k).reshape(-1), torch.ones(tokens * k)
    )
    step = torch.sign(counts.mean() - counts) * SPEC["rate"]
    out |= {
        "bias/counts": counts,
        "bias/rate": torch.tensor(SPEC["rate"]),
        "bias/sign": bias + step,
    }
    arrays = {n: v.detach().numpy() if isinstance(v, torch.Tensor) else v for n, v in out.items()}
    for n in ("x", "w", "bias", "linear_bias", "r"):
        arrays[n] = arrays[n].astype(np.float16)
    np.savez_compressed(HERE / "moe_router.npz", **arrays)


if __name__ == "__main__":
    main()
