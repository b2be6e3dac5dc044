"""One dense step that empties the residuals: a function, and a callback for each Lightning package."""

from lightning_sparse.flushing.flush import flush

__all__ = ["flush"]
