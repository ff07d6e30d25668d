"""Muon in float64: five steps on matrices of several shapes, all scalings, splits of fused weights.

usage: python tests/goldens/make_muon_goldens.py  (needs torch)

Weights are [out, in] (transpose them for Paddle's layout; the scale is that of [out, in]).
  CASE/options  JSON; CASE/w0 [out, in]; CASE/g [steps, out, in]; CASE/w [out, in] after the last;
  CASE/m [out, in] the momentum m <- mu m + (1 - mu) g
  CASE/bf16     for unsplit cases: the weights after the last step by torch.optim.Muon (bfloat16 iterations)
  ns/NAME/x, y  Newton-Schulz alone, for every coefficient table (name in options)
The orthogonalised matrix of a split weight is put together again in the weight's own order of rows:
  qkv_grouped   rows [group][q ... q, k, v][d]; "three": all q rows, all k rows and all v rows
                are a matrix each; "heads": every head is one
  gate_up       rows [gate; up]: two matrices
"""

import json
from pathlib import Path

import numpy as np
import torch

HERE = Path(__file__).parent
TABLES = {
    "simple": [(3.4445, -4.7750, 2.0315)],
    "quintic": [
        (4.0848, -6.8946, 2.9270), (3.9505, -6.3029, 2.6377), (3.7418, -5.5913, 2.3037),
        (2.8769, -3.1427, 1.2046), (2.8366, -3.0525, 1.2012),
    ],
    "polar_express": [
        (8.2051, -22.9019, 16.4607), (4.0664, -2.8612, 0.5184), (3.9096, -2.8234, 0.5250),
        (3.2856, -2.4153, 0.4853), (2.2779, -1.6198, 0.3985), (1.8726, -1.2307, 0.3585),
        (1.8564, -1.2132, 0.3568), (1.8750, -1.2500, 0.3750),
    ],
    "aol": [
        (4.0098, -7.0585, 2.4635), (3.4585, -5.5479, 2.5959), (2.7573, -3.2939, 1.4254),
        (2.7215, -3.0494, 1.3169),
    ],
}  # fmt: skip
SPEC = {
    "seed": 31,
    "steps": 5,
    "lr": 0.02,
    "wd": 0.1,
    "mu": 0.95,
    "eps": 1e-7,
    "cases": {
        "tall_original": {"shape": [24, 10], "scale": "original"},
        "wide_original": {"shape": [10, 24], "scale": "original"},
        "tall_rms": {"shape": [24, 10], "scale": "match_rms_adamw"},
        "wide_rms": {"shape": [10, 24], "scale": "match_rms_adamw"},
        "square_rms": {"shape": [16, 16], "scale": "match_rms_adamw"},
        "wide_spectral": {"shape": [12, 20], "scale": "spectral", "table": "quintic"},
        "wide_unit_rms": {"shape": [12, 20], "scale": "unit_rms_norm", "table": "quintic"},
        "no_nesterov": {"shape": [16, 12], "scale": "match_rms_adamw", "nesterov": False},
        "schedule": {
            "shape": [12, 16], "scale": "match_rms_adamw", "lrs": [0.0, 0.01, 0.02, 0.02, 0.005], "wd": 0.0,
        },
        "qkv_three": {
            "shape": [32, 16], "scale": "match_rms_adamw", "split": "three", "groups": 2, "per": 2, "d": 4,
        },
        "qkv_heads": {
            "shape": [32, 16], "scale": "match_rms_adamw", "split": "heads", "groups": 2, "per": 2, "d": 4,
        },
        "qkv_whole": {"shape": [32, 16], "scale": "match_rms_adamw", "same_as": "qkv_three"},
        "gate_up": {"shape": [40, 16], "scale": "match_rms_adamw", "split": "gate_up"},
        "zero_gradient": {"shape": [8, 6], "scale": "match_rms_adamw", "zero": True},
    },
}  # fmt: skip


def newton_schulz(x, table, steps, eps):
    if table == "polar_express" and steps > len(TABLES[table]):
        sets = TABLES[table] + [TABLES[table][-1]] * (steps - len(TABLES[table]))
    else:
        sets = [TABLES[table][i % len(TABLES[table])] for i in range(steps)]
    tall = x.shape[0] > x.shape[1]
    x = x.T if tall else x
    x = x / max(float(x.norm()), eps)
    for a, b, c in sets:
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.T if tall else x


def scale(kind, rows, columns):
    return {
        "original": max(1.0, rows / columns) ** 0.5,
        "match_rms_adamw": 0.2 * max(rows, columns) ** 0.5,
        "spectral": max(rows, columns) ** 0.5,
        "unit_rms_norm": (rows / columns) ** 0.5,
    }[kind]


def orthogonal(update, o, steps, eps):
    def one(block):
        return newton_schulz(block, o.get("table", "simple"), steps, eps) * scale(o["scale"], *block.shape)

    split = o.get("split")
    if split is None:
        return one(update)
    if split == "gate_up":
        return torch.cat([one(part) for part in update.chunk(2)])
    groups, per, d = o["groups"], o["per"], o["d"]
    blocks = update.view(groups, per + 2, d, -1)
    out = torch.empty_like(blocks)
    if split == "heads":
        for i in range(groups):
            for j in range(per + 2):
                out[i, j] = one(blocks[i, j])
    else:
        for part in (slice(0, per), slice(per, per + 1), slice(per + 1, per + 2)):
            rows = blocks[:, part]
            out[:, part] = one(rows.reshape(-1, rows.shape[-1])).view(rows.shape)
    return out.view(update.shape)


def main():
    spec = SPEC
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)
    out = {}
    steps, mu, eps = spec["steps"], spec["mu"], spec["eps"]
    for number, (name, o) in enumerate(spec["cases"].items()):
        source = list(spec["cases"]).index(o["same_as"]) if "same_as" in o else number
        g = torch.Generator().manual_seed(spec["seed"] * 100 + source)
        w0 = (torch.randn(o["shape"], generator=g, dtype=torch.float32) * 0.2).half().double()
        grads = (
            (
                torch.randn(steps, *o["shape"], generator=g, dtype=torch.float32)
                + torch.randn(1, o["shape"][0], 1, generator=g, dtype=torch.float32)
            )
            .half()
            .double()
        )
        if o.get("zero"):
            grads[:2] = 0
        lrs, wd = o.get("lrs", [spec["lr"]] * steps), o.get("wd", spec["wd"])
        w, m = w0.clone(), torch.zeros_like(w0)
        for t in range(steps):
            m = mu * m + (1 - mu) * grads[t]
            update = (1 - mu) * grads[t] + mu * m if o.get("nesterov", True) else m
            change = orthogonal(update, o, o.get("ns_steps", 5), eps)
            w = (1 - lrs[t] * wd) * w - lrs[t] * change
        out |= {
            f"{name}/options": np.array(json.dumps({**o, "lr": lrs, "wd": wd, "mu": mu, "eps": eps})),
            f"{name}/w0": w0.numpy().astype(np.float16),
            f"{name}/g": grads.numpy().astype(np.float16),
            f"{name}/w": w.numpy(),
            f"{name}/m": m.numpy(),
        }
        if o["scale"] in ("original", "match_rms_adamw") and not o.get("split"):
            p = torch.nn.Parameter(w0.float())
            opt = torch.optim.Muon(
                [p],
                lr=lrs[0],
                weight_decay=wd,
                momentum=mu,
                nesterov=o.get("nesterov", True),
                adjust_lr_fn=o["scale"],
                eps=eps,
            )
            for t in range(steps):
                opt.param_groups[0]["lr"] = lrs[t]
                p.grad = grads[t].float()
                opt.step()
            out[f"{name}/bf16"] = p.detach().numpy()
    g = torch.Generator().manual_seed(spec["seed"])
    x = torch.randn(9, 14, generator=g, dtype=torch.float32).half().double()
    out["ns/x"] = x.numpy()
    for table, counts in (
        ("simple", (5, 1)),
        ("quintic", (5, 10)),
        ("polar_express", (8, 10)),
        ("aol", (4,)),
    ):
        for count in counts:
            out[f"ns/{table}_{count}"] = newton_schulz(x, table, count, eps).numpy()
    np.savez_compressed(HERE / "muon.npz", **out)


if __name__ == "__main__":
    main()
