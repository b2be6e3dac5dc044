"""The version of the package, which metadata of an installation repeat."""

__version__ = "0.1.0"
