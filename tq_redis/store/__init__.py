"""What keeps blocks alive: a shelf of blocks, and the ZeroMQ server and client for it.

Both kinds of store are made of it: the actor that runs on every Ray node, and the storage unit for
processes outside Ray. Nothing here imports torch, so that a store starts at once and stays small.
"""
