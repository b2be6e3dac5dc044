"""Densities: the share of coordinates to send, and its schedules."""

from lightning_sparse.methods.density.accordion import Accordion, AccordionDensity
from lightning_sparse.methods.density.schedules import (
    Constant,
    DensitySchedule,
    GroupDensity,
    Warmup,
    as_schedule,
    check_density,
    count,
)

__all__ = [
    "Accordion",
    "AccordionDensity",
    "Constant",
    "DensitySchedule",
    "GroupDensity",
    "Warmup",
    "as_schedule",
    "check_density",
    "count",
]
