#!/usr/bin/env bash
# One card, one GLUE task: ./projects/gpt/finetune_gpt_345M_single_card.sh TASK [matched|mismatched] [-o key=value ...]
# TASK: CoLA SST2 MRPC QQP STSB MNLI QNLI RTE WNLI. Files of the task: ./dataset/{GLUE's name}/{train,dev}.tsv.
set -euo pipefail
cd "$(dirname "$0")/../.."

task="${1:-}"
dev=dev epochs=3
case "$task" in
    CoLA | QQP | QNLI | RTE) directory="$task" ;;
    SST2) directory=SST-2 ;;
    STSB) directory=STS-B ;;
    MRPC | WNLI) directory="$task" epochs=5 ;;
    MNLI)
        directory=MNLI dev=dev_matched
        case "${2:-}" in
            matched | mismatched) dev="dev_$2" && set -- "$1" "${@:3}" ;;
        esac
        ;;
    *)
        echo "usage: $0 CoLA|SST2|MRPC|QQP|STSB|MNLI|QNLI|RTE|WNLI [matched|mismatched] [-o key=value ...]" >&2
        exit 2
        ;;
esac
shift

# What belongs to the task, where the command line does not set it.
given=" $* " overrides=()
default() {
    [[ "$given" == *" $1="* ]] || overrides+=(-o "$1=$2")
}
default Engine.save_load.output_dir "./output/finetune_$task"
default Engine.num_train_epochs "$epochs"
for part in Train Eval; do
    default "Data.$part.dataset.name" "$task"
    default "Data.$part.dataset.input_dir" "./dataset/$directory"
done
default Data.Eval.dataset.split "$dev"

exec python tools/train.py -c ppfleetx/configs/nlp/gpt/finetune_gpt_345M_single_card_glue.yaml "${overrides[@]}" "$@"
