#!/usr/bin/env bash
# Two nodes of eight GPUs under Slurm: the trainer on six of each, a replica on the other two of each, buffer and reward service on the
# first node (docs/gpu.md).
#
#   sbatch examples/slurm_two_nodes.sh
#
# The checkout, with its .venv, lies on a file system that both nodes see. This has never been run.
#SBATCH --job-name=headrace
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --signal=B:TERM@900
set -euo pipefail

config=${CONFIG:-examples/gpu_32b_16gpus.yaml}
ranks=${RANKS:-6}         # the trainer's, on each node; `headrace config check` tells how many a model needs
replicas=${REPLICAS:-1}   # on each node
tp=${ROLLOUT_TP:-2}       # GPUs of a replica: policy.generation.vllm_cfg.tensor_parallel_size
nodes=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
first=$(sed -n 1p <<<"$nodes") second=$(sed -n 2p <<<"$nodes")
# in place of its shell, which would keep a signal to itself
on() { local node=$1; shift; exec srun --overlap --nodes=1 --ntasks=1 --nodelist="$node" "$@"; }

# the first node's address on the way to the second: its name may be 127.0.1.1 there
address=$(on "$first" sh -c 'ip -4 route get "$(getent ahostsv4 "$1" | sed -n "1s/ .*//p")" | sed -n "s/.* src \([^ ]*\).*/\1/p"' sh "$second")
export HEADRACE_RUN__ID="slurm-$SLURM_JOB_ID" HEADRACE_POLICY__GENERATION__VLLM_CFG__TENSOR_PARALLEL_SIZE=$tp
export HEADRACE_TRAINER__NUM_PROCESSES=$((2 * ranks)) HEADRACE_ROLLOUT__REPLICAS=$((2 * replicas))
export HEADRACE_REPLAY__REDIS_HOST=$address
# no TLS and no tokens: in a network that you trust alone. Else give a rediss:// server, certificates and credentials (docs/security.md).
export HEADRACE_SECURITY__INSECURE=true

(on "$first" .venv/bin/headrace config check "$config" --gpu-memory "${GPU_MEMORY:-79}" --gpus 16)

on "$first" .venv/bin/headrace replay --config "$config" &
on "$first" .venv/bin/headrace reward --config "$config" &
trainers=()
for node in "$first" "$second"; do
  for ((i = 0; i < replicas; i++)); do
    own=$(seq -s, $((ranks + i * tp)) $((ranks + i * tp + tp - 1)))
    on "$node" env CUDA_VISIBLE_DEVICES="$own" .venv/bin/headrace rollout --config "$config" &
  done
  on "$node" env CUDA_VISIBLE_DEVICES="$(seq -s, 0 $((ranks - 1)))" .venv/bin/python -m headrace_services.trainer.launch "$ranks" \
    --nnodes 2 --rdzv-backend c10d --rdzv-endpoint "$address:29500" -m headrace.cli trainer --config "$config" &
  trainers+=($!)
done
# a job whose time ends saves a checkpoint: srun passes the signal on, and the same run.id goes on from it
trap 'kill -TERM "${trainers[@]}"' TERM
code=0
wait "${trainers[0]}" || code=$?
if kill -0 "${trainers[0]}" 2>/dev/null; then code=0; wait "${trainers[0]}" || code=$?; fi   # the signal came first
exit "$code"
