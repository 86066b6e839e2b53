"""GRPO on verl's own parts, with every sample in tq_redis."""
