"""verl is imported by these tests: choose its CPU platform before that happens."""

from recipe.ppo.cluster import prepare_environment

prepare_environment()
