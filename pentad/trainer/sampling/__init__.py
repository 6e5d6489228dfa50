"""The samplers of a run, from its config to the proof that they hold the learner's policy.

Contract: `samplers` opens them (in this process, in processes of their own, as servers),
`sampler_side` connects them with the learner: groups one way, weights the other; `placement` says
which side has the devices that both share. `selftest` compares log-probs and digests before the
first step and while the run trains; `evaluate` scores a validation set.
"""
