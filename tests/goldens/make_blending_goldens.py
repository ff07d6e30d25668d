"""The order in which Megatron-LM draws the samples of a blend, for tests without it.

    python tests/goldens/make_blending_goldens.py

writes blending.json beside this file: for each case the two arrays, or their hashes where they are long.
Needs the package megatron-core, which brings the compiled `helpers_cpp`. Made with the sources of Megatron-LM
d98e8a64. Weights are divided by their sum with NumPy, as its builder does; sizes are numbers of samples.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
from megatron.core.datasets import helpers_cpp

HERE = Path(__file__).parent
LONGEST_SHOWN = 40


def arrays(size: int) -> tuple[np.ndarray, np.ndarray]:
    return np.zeros(size, np.int16), np.zeros(size, np.int64)


def shown(values: np.ndarray) -> list[int] | str:
    return values.tolist() if len(values) <= LONGEST_SHOWN else hashlib.md5(values.tobytes()).hexdigest()


def weighted(weights: list[float], size: int) -> dict:
    shares = np.array(weights, np.float64)
    shares = shares / np.sum(shares)
    index, sample_index = arrays(size)
    helpers_cpp.build_blending_indices(index, sample_index, shares, len(weights), size, False)
    return {"weights": weights, "size": size, "index": shown(index), "sample_index": shown(sample_index)}


def exhaustive(sizes: list[int]) -> dict:
    index, sample_index = arrays(sum(sizes))
    helpers_cpp.build_exhaustive_blending_indices(index, sample_index, np.array(sizes, np.int64), len(sizes))
    return {"sizes": sizes, "index": shown(index), "sample_index": shown(sample_index)}


def main() -> None:
    rng = np.random.default_rng(5)
    blends = [weighted([0.5, 0.3, 0.2], 12), weighted([7, 7, 7], 20), weighted([1, 1000], 30_000)]
    whole = [exhaustive([1]), exhaustive([3, 1]), exhaustive([5, 5, 5]), exhaustive([1, 7, 2, 1, 9])]
    for number in range(20):
        shares = rng.dirichlet(np.ones(rng.integers(2, 30))) ** rng.choice([1, 4])
        blends.append(
            weighted([round(share, 9) + 1e-9 for share in shares.tolist()], int(rng.integers(1, 6000)))
        )
        largest = [4, 60, 3000][number % 3]
        whole.append(exhaustive(rng.integers(1, largest, rng.integers(2, 30)).tolist()))
    whole.append(exhaustive([100_000, 1, 70_000, 33]))
    (HERE / "blending.json").write_text(
        json.dumps({"weighted": blends, "exhaustive": whole}, indent=0) + "\n"
    )


if __name__ == "__main__":
    main()
