"""``python -m tq_redis`` is the command ``tq-redis``."""

from tq_redis.cli import main

main(prog_name="tq-redis")
