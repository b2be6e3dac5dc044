"""Slow, plain NumPy oracles that share no code with the library they check."""
