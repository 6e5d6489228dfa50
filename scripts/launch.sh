#!/usr/bin/env bash
# Starts `pentad pretrain` under torchrun; run it on every machine with the recipe and overrides as words:
#   NUM_NODES=32 GPUS_PER_NODE=8 RDZV_ENDPOINT=head:29500 RUN_ID=moe-1 scripts/launch.sh recipe.yaml
# NUM_NODES=MIN:MAX lets machines come and go (elastic.enabled=true, docs/elastic.md). RDZV_BACKEND is c10d or
# etcd-v2, RDZV_CONF its settings. With c10d the machine of RDZV_ENDPOINT holds the rendezvous: when it is lost, all are. PYTHON is the interpreter,
# COMMAND another command of pentad's that trains.
set -euo pipefail

# A lost peer ends the others at once instead of after the ten minutes that a collective may take.
export TORCH_NCCL_ASYNC_ERROR_HANDLING="${TORCH_NCCL_ASYNC_ERROR_HANDLING:-1}"
# Without it the ranks of a restart find the addresses of the last ones in the agents' store.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1

restarts="${MAX_RESTARTS:-3}"
for word in "$@"; do
  if [ "$word" = --fresh ]; then restarts=0; fi # a restart would throw away what was trained
done
exec "${PYTHON:-python}" -m torch.distributed.run \
  --nnodes "${NUM_NODES:-1}" \
  --nproc-per-node "${GPUS_PER_NODE:-8}" \
  --rdzv-backend "${RDZV_BACKEND:-c10d}" \
  --rdzv-endpoint "${RDZV_ENDPOINT:-localhost:29500}" \
  --rdzv-id "${RUN_ID:-pentad}" \
  ${RDZV_CONF:+--rdzv-conf "$RDZV_CONF"} \
  --max-restarts "$restarts" \
  -m pentad.cli.main "${COMMAND:-pretrain}" "$@"
