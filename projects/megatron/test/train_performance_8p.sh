#!/usr/bin/env bash
# bash ./test/train_performance_8p.sh --data_path=$real_data_path --model_size=345M --train_iters=500000
# Sizes: 345M, 1.3B, 2.7B, 3.7B, 345M_without_mp. Further arguments (--hidden-size=64) replace those of the size.
set -euo pipefail
exec python3 "$(dirname "$0")/train_8p.py" performance "$@"
