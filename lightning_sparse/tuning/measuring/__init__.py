"""Measurements between real ranks: backward, the network, and the cost of groups."""
