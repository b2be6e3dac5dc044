"""Comparisons of sparsifiers that anyone can repeat: tasks, measures, and training as the judge."""
