#!/usr/bin/env bash
# Eight cards of one machine. Without GPUs: DEVICES="--nproc_per_node 8" runs eight processes on the CPU.
set -euo pipefail
cd "$(dirname "$0")/../.."
read -ra devices <<<"${DEVICES:---devices 0,1,2,3,4,5,6,7}"
exec python -m paddle.distributed.launch --log_dir "${LOG_DIR:-log_pretrain_gpt_1.3B_dp8}" "${devices[@]}" \
    tools/train.py -c ppfleetx/configs/nlp/gpt/pretrain_gpt_1.3B_dp8.yaml "$@"
