"""Checkpoints on disk: directories that are whole or not there. Nothing here knows Redis."""
