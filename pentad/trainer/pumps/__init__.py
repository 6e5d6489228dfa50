"""Pumps: background tasks of an RL run, on the event loop of its scheduler.

Contract: pumps share one `RunState` (ledger, store, staleness budget) and wait for its changes. The
rollout pump admits prompts within the budget and commits groups, the score pump adds columns, the
steps lease and acknowledge groups, the publish pump installs weights. A failed pump ends the run;
the watchdog names a stuck one. `scheduler` runs them; `state` is shared.
"""
