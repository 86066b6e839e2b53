"""Prompts and exact rewards. Nothing is downloaded."""
