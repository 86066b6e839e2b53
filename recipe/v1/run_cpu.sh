#!/bin/sh
# verl's own V1 trainer, its samples in tq_redis, on two CPU cores, from the repository's root:
#   recipe/v1/run_cpu.sh [--output FOLDER] [--state resume] [name=value ...]
set -eu
cd "$(dirname "$0")/../.."
exec "${PYTHON:-python}" -m recipe.v1.main "$@"
