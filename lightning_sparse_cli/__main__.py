"""``python -m lightning_sparse_cli``."""

from lightning_sparse_cli import main

main()
