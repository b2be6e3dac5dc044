"""Optimizers that apply averages: their steps, their momentum, clipping, and learning rates."""
