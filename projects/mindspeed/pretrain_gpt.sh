#!/usr/bin/env bash
# bash pretrain_gpt.sh: train what pretrain_gpt_38BV3.yaml says with eight ranks of this host. The loss is in
# msrun_log/worker_*.log. Another file or further arguments: bash pretrain_gpt.sh --yaml-cfg FILE --train-iters 10
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
PATH="$here:$PATH"
msrun --worker_num 8 --local_worker_num=8 --master_port=8848 --log_dir=msrun_log --join=True --cluster_time_out=300 \
    "$here/pretrain_gpt.py" "$@"
