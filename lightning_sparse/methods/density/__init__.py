"""Densities: the share of coordinates to send, and its schedules."""

from lightning_sparse.methods.density.schedules import (
    Constant,
    DensitySchedule,
    Warmup,
    as_schedule,
    check_density,
    count,
)

__all__ = ["Constant", "DensitySchedule", "Warmup", "as_schedule", "check_density", "count"]
