"""verl is imported by these tests: choose its CPU platform before that happens."""

from recipe.ppo.environment import prepare_environment

prepare_environment()
