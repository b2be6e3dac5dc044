"""Tests compute with one thread for each process."""

import torch


def test_nothing_imported_torch_before_it_was_told() -> None:
    assert torch.get_num_threads() == 1
