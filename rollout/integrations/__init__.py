"""Trainers' glue, one file a trainer. Importing this package imports none of them: `rollout.integrations.trl` does."""
