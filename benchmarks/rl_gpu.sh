#!/usr/bin/env bash
# Whole GRPO steps beside TRL's, one table a case: rl_gpu.sh SmolLM2 | Qwen3-0.6B | cpu [STEPS]
# On a GPU TRL samples with vLLM in its own process; `cpu` runs the CPU cases on one core. Needs
# trl, datasets, accelerate (and vllm on a GPU) in the environment or on PYTHONPATH; no network.
set -euo pipefail
what=${1:?SmolLM2, Qwen3-0.6B or cpu} steps=${2:-3}
cd "$(dirname "$0")/.."
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
python=${PYTHON:-python3}
"$python" -c 'import trl, datasets, accelerate'
if [ "$what" = cpu ]; then
  export CUDA_VISIBLE_DEVICES="" OMP_NUM_THREADS=1
  exec taskset -c "${CORE:-0}" "$python" -m pentad.cli.main bench rl --device cpu --steps "$steps"
fi
export VLLM_USE_FLASHINFER_SAMPLER=0  # it is compiled at its first use, which needs nvcc
"$python" -c 'import importlib.util as u; assert u.find_spec("vllm"), "no vllm on PYTHONPATH"'
exec "$python" -m pentad.cli.main bench rl --device cuda --models "$what" --steps "$steps"
