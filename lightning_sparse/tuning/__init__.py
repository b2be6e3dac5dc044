"""Observers that change an engine between two steps: cost models, planner, dense fallback, watchdogs."""
