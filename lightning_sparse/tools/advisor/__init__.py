"""Does sparsification pay for this model, on this machine and network, and which? Asked before training."""

from lightning_sparse.tools.advisor.prediction import Measured, Method, Prediction, Scenario
from lightning_sparse.tools.advisor.run import Advice, advise

__all__ = ["Advice", "Measured", "Method", "Prediction", "Scenario", "advise"]
