#!/usr/bin/env bash
# Share the prompts of a file among eight devices: ./projects/gpt/inference_gpt_345M_dp8.sh -o Generation.prompt_file=prompts.txt
set -euo pipefail
cd "$(dirname "$0")/../.."
exec python -m paddle.distributed.launch --log_dir log_inference --devices "0,1,2,3,4,5,6,7" \
    tools/inference.py -c ppfleetx/configs/nlp/gpt/inference_gpt_345M_dp8.yaml "$@"
