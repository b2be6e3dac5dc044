"""Sharded replicas: FSDP2 within each of them, and the exchange of each rank's part between them."""
