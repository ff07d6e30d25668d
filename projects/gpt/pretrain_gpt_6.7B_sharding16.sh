#!/usr/bin/env bash
# 2 machines of eight cards: run it on each with MASTER=ip:port of one of them.
set -euo pipefail
cd "$(dirname "$0")/../.."
: "${MASTER:?give MASTER=ip:port of one of the machines, the same on all}"
read -ra devices <<<"${DEVICES:---devices 0,1,2,3,4,5,6,7}"
exec python -m paddle.distributed.launch --log_dir "${LOG_DIR:-log_pretrain_gpt_6.7B_sharding16}" \
    --master "$MASTER" --nnodes "${NNODES:-2}" "${devices[@]}" \
    tools/train.py -c ppfleetx/configs/nlp/gpt/pretrain_gpt_6.7B_sharding16.yaml "$@"
