"""A web page for trained models: see, hear and compare what they draw, and watch them learn."""

from perceiver_ar.playground.server import serve

__all__ = ["serve"]
