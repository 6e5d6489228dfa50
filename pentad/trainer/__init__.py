"""Runs a job: one loop over batches, whatever they come from.

Contract: a `Run` takes a batch from its `BatchSource`, has the learner train it, guards it, hands
the weights to sinks, saves, records, and commits, in this order and once for every kind of run.
A batch is trained exactly once; a run that is started again continues bit by bit.

In the order of reading:

1. `run`: the loop, what is restored before it, and how a run ends. `context` (folders, log,
   records), `resume` (which checkpoint) and `stopping` (signals) are what it stands on.
2. Sources: `examples` (supervised, pretraining), `kept_groups` (train only), `rollouts`
   (reinforcement learning), `rollout_only` (a step writes its batch). `replay` compares.
3. `rollouts` and its pumps: `state`, `scheduler`, `rollout_pump`, `train_pump`, `scorers`,
   `placement`, `sampler_side`, `samplers`, `selftest`, `evaluate`.
4. What a rank of the learner runs: `service`, `example_service`, `learners`, `update`.
5. Saving: `periodic`, `saver` (HF exports), `recovery` (checkpoints), `batches`, `records`.
6. Processes: `ranks`, `supervisor`, `membership`, `resources`, `fresh`, `learner_client`.
7. Before a start: `preflight`, `reward_trial`, `run_folders`.
"""
