"""Services that every rank of a learner runs, in its own or the scheduler's process.

Contract: a service has methods that the scheduler calls on all ranks in one order, JSON in and JSON
out; rank 0 answers. Data are read from the store or the dataset, weights leave as folders of files.
`service`: reinforcement learning and kept groups; `example_service`: supervised runs; `learners`
makes engines from the config; `update` trains one batch.
"""
