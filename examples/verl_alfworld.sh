#!/usr/bin/env bash
# SPEAR in verl on ALFWorld with the paper's settings, on one node.
#
#   pip install 'spear-rl[verl]' vllm==0.24.0
#   export ALFWORLD_DATA=...            # where `alfworld-download` put the games
#   examples/verl_alfworld.sh           # Qwen2.5-1.5B; MODEL=Qwen/Qwen2.5-7B-Instruct for the larger one
#
# On a Ray cluster, start Ray on every node, share RUN between them, and add after the `--` below
#   trainer.nnodes=2 +ray_kwargs.ray_init.address=auto
# Without SPEAR, but otherwise the same run: examples/verl_alfworld.sh algorithm.name=dr-bot-gigpo
set -euo pipefail

MODEL=${MODEL:-Qwen/Qwen2.5-1.5B-Instruct}
RUN=${RUN:-runs/verl-alfworld}
GPUS=${GPUS:-8}

spear verl --check
exec spear verl paper-alfworld "engine.model=$MODEL" "run.dir=$RUN" "$@" -- \
  "trainer.n_gpus_per_node=$GPUS" \
  actor_rollout_ref.rollout.gpu_memory_utilization=0.6 \
  actor_rollout_ref.model.enable_gradient_checkpointing=True
