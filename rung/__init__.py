"""rung trains generative sequence models and keeps the lab book while it does."""

__version__ = "0.1.0"
