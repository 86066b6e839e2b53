#!/bin/sh
# GRPO on two CPU cores, from the repository's root:  recipe/ppo/run_cpu.sh [seed] [name=value ...]
set -eu
cd "$(dirname "$0")/../.."
seed=${1:-0}
[ $# -eq 0 ] || shift
exec "${PYTHON:-python}" -m recipe.ppo.main_ppo "seed=$seed" "$@"
