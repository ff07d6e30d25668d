#!/usr/bin/env bash
# run_distribute.sh RANK_TABLE_FILE CONFIG_PATH [a,b] RUN_MODE [RANK_SIZE]
#
# Starts the ranks a to b - 1 on this host and waits for them; ends with their exit code.
# Several hosts: the same on each, with the merged table. The first host of the table is the meeting
# point, at port $MASTER_PORT (6379). Nothing is deleted; logs are in mf_parallel_a_b/.
exec "${PYTHON:-python}" "$(dirname "${BASH_SOURCE[0]}")/run_distribute.py" "$@"
