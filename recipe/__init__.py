"""Training recipes on tq_redis and verl."""
