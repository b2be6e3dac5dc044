"""Nodes: ranks with fast links average densely, and each of them exchanges a part of the mean with other nodes."""
