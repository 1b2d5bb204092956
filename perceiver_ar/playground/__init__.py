"""A web page for trained models: see, hear and compare their samples, and watch them train."""

from perceiver_ar.playground.server import serve

__all__ = ["serve"]
