"""The samplers of a run, and the checks that they have the learner's policy.

Contract: `samplers` opens them (in this process, in separate processes, as servers), `sampler_side`
connects them with the learner, which receives groups and sends weights; `placement` decides which
role uses shared devices. `selftest` compares log-probs and digests before the first step and during
training; `evaluate` scores a validation set.
"""
