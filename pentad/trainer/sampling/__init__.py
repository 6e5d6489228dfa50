"""The samplers of a run, from its config to the proof that they hold the learner's policy.

Contract: `samplers` opens them (in this process, in separate processes, as servers), `sampler_side`
connects them with the learner: groups one way, weights the other; `placement` says which side uses
the shared devices. `selftest` compares log-probs and digests before the first step and during
training; `evaluate` scores a validation set.
"""
