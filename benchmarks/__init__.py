"""What the project costs, and what transfer_queue costs for the same work, in one run.

``python -m benchmarks.control`` measures the control plane. docs/performance.md explains the
figures.
"""
