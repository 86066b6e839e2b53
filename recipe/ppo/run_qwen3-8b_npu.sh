#!/bin/sh
# The run of run_qwen3-8b_gpu.sh on 8 Ascend NPUs: what differs, and its arguments behind it.
# From the repository's root:  recipe/ppo/run_qwen3-8b_npu.sh [name=value ...]
#
# Needs verl 0.9.1 with torch_npu, vllm and vllm-ascend, and the environment of the Ascend toolkit
# (set_env.sh).
set -eu

# Eight processes that load 16 GB each do not connect at the same moment.
export HCCL_CONNECT_TIMEOUT="${HCCL_CONNECT_TIMEOUT:-1500}"
# As verl has it: training and vLLM share a device, and would ask for the same ports.
export HCCL_HOST_SOCKET_PORT_RANGE="${HCCL_HOST_SOCKET_PORT_RANGE:-auto}"
export HCCL_NPU_SOCKET_PORT_RANGE="${HCCL_NPU_SOCKET_PORT_RANGE:-auto}"

exec "$(dirname "$0")/run_qwen3-8b_gpu.sh" \
    trainer.device=npu \
    trainer.experiment_name=qwen3_8b_grpo_npu \
    actor_rollout_ref.actor.use_torch_compile=false \
    actor_rollout_ref.actor.fsdp_config.use_torch_compile=false \
    actor_rollout_ref.actor.entropy_from_logits_with_chunking=true \
    actor_rollout_ref.ref.fsdp_config.use_torch_compile=false \
    actor_rollout_ref.ref.entropy_from_logits_with_chunking=true \
    "$@"
