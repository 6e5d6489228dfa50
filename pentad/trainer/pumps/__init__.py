"""Pumps: background tasks of an RL run, on the event loop of its scheduler.

Contract: pumps share one `RunState` (ledger, store, staleness budget) and wait for its changes. The
rollout pump admits prompts within the budget and commits groups, the score pump adds columns, the
steps lease and acknowledge them, the publish pump installs weights. A pump that fails ends the run;
the watchdog names what is stuck. `scheduler` runs them; `state` is what they share.
"""
