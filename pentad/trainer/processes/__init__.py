"""The processes of a run, and recovery when one is lost."""
