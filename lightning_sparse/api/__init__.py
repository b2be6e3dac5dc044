"""Functions that users call: attach, simulate, flush."""
