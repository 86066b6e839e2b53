"""What the project costs, and what transfer_queue costs for the same work, in one run.

``python -m benchmarks.control`` measures the control plane, ``python -m benchmarks.data`` the data
plane. docs/performance.md explains the figures.
"""
