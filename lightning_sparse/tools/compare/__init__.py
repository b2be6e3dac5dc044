"""Reproducible comparisons of sparsifiers: tasks, measures, and closed-loop training."""
