#!/bin/sh
# GRPO on Qwen3-8B: FSDP2 on 8 GPUs, answers from vLLM servers on the same GPUs, two GPUs each.
# From the repository's root:  recipe/ppo/run_qwen3-8b_gpu.sh [name=value ...]
#
# Needs verl 0.9.1 with vllm and flash-attn, and problems in verl's format (prompt, data_source,
# reward_model) as train.parquet and test.parquet in DATA. Every setting can be given again at the
# end of the command. On several nodes, start a Redis that all of them reach and set TQ_REDIS_URL.
set -eu
cd "$(dirname "$0")/../.."
model=${MODEL:-Qwen/Qwen3-8B}
data=${DATA:-$HOME/data/gsm8k}

# The recipe is offline by default: here the model may come by its name.
export HF_HUB_OFFLINE="${HF_HUB_OFFLINE:-0}"
# As verl has it: the cache of compiled kernels has been seen corrupt.
export VLLM_DISABLE_COMPILE_CACHE="${VLLM_DISABLE_COMPILE_CACHE:-1}"

exec "${PYTHON:-python}" -m recipe.ppo.main_ppo \
    --config-name tq_redis_ppo_trainer \
    'hydra.searchpath=[pkg://verl.trainer.config]' \
    algorithm.adv_estimator=grpo \
    algorithm.use_kl_in_reward=false \
    data.train_files="'$data/train.parquet'" \
    data.val_files="'$data/test.parquet'" \
    data.train_batch_size=256 \
    data.max_prompt_length=512 \
    data.max_response_length=1024 \
    data.filter_overlong_prompts=true \
    data.truncation=error \
    actor_rollout_ref.model.path="'$model'" \
    actor_rollout_ref.model.use_remove_padding=true \
    actor_rollout_ref.model.enable_gradient_checkpointing=true \
    actor_rollout_ref.actor.strategy=fsdp2 \
    actor_rollout_ref.actor.optim.lr=1e-6 \
    actor_rollout_ref.actor.ppo_mini_batch_size=64 \
    actor_rollout_ref.actor.use_dynamic_bsz=true \
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=24576 \
    actor_rollout_ref.actor.use_kl_loss=true \
    actor_rollout_ref.actor.kl_loss_coef=0.001 \
    actor_rollout_ref.actor.kl_loss_type=low_var_kl \
    actor_rollout_ref.actor.entropy_coeff=0 \
    actor_rollout_ref.ref.fsdp_config.param_offload=true \
    actor_rollout_ref.rollout.name=vllm \
    actor_rollout_ref.rollout.mode=async \
    actor_rollout_ref.rollout.tensor_model_parallel_size=2 \
    actor_rollout_ref.rollout.gpu_memory_utilization=0.6 \
    actor_rollout_ref.rollout.n=5 \
    trainer.project_name=tq_redis \
    trainer.experiment_name=qwen3_8b_grpo \
    'trainer.logger=[console]' \
    trainer.device=cuda \
    trainer.nnodes=1 \
    trainer.n_gpus_per_node=8 \
    trainer.save_freq=20 \
    trainer.test_freq=5 \
    trainer.max_actor_ckpt_to_keep=2 \
    trainer.total_epochs=15 \
    "$@"
