"""Linear layers whose weights are sharded: tensor parallelism, scales that a boundary splits, gathered codes."""
