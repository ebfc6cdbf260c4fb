#!/usr/bin/env bash
# Llama-13B on four machines of eight cards. Type the same on each of them, the address being one of theirs:
#   MASTER_ADDR=10.0.0.1 bash examples/pre-training/llama/run_node4.sh
# Words behind it are keys of the run (max_steps=10); on another number of machines: NNODES=2.
set -eu
cd "$(dirname "$0")/../../.."
export NNODES="${NNODES:-4}" MASTER_ADDR="${MASTER_ADDR:?an address of one of the machines}" MASTER_PORT="${MASTER_PORT:-8080}"
exec erniekit train examples/pre-training/llama/pretrain-llama_13b.yaml "$@"
