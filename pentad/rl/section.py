"""The keys of the block `guards`, read by `bounds.py`."""

from __future__ import annotations

from pentad.core.section import Count, NonNegativeInt, Positive, Section, Share


class GuardsConfig(Section):
    """When a run that trains something else than it should is stopped."""

    max_logprob_gap: Positive | None = 0.3
    """Largest mean difference of a token's log-prob between trainer and sampler, on samples drawn
    with the weights that are trained (ten times as much where all are older); a shift of all
    log-probs counts three times. null: any."""
    patience_steps: Count = 5
    """Steps in a row past a bound (one log-prob reported for all tokens, gradients that are not
    finite) that stop the run; of log-prob differences, as many of the last twice as many."""
    max_nonfinite_share: Share = 0.5
    """Also stops when more than this share of the last 20 steps had no finite gradient."""
    max_rollbacks: NonNegativeInt = 2
    """How often a run that would stop, since `patience_steps` gradients in a row were not finite,
    goes back to the weights and optimizer state of its newest recovery checkpoint instead (of an
    older one if that has not helped). Steps, data and learning rate go on: what was trained since
    is not trained again."""
    replica_check_steps: Count | None = 100
    """Steps after which ranks compare what several of them hold copies of, weights and optimizer
    state, bit by bit; a difference ends the run before it is saved. null: never."""
