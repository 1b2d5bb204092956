"""Bridges to other people's code and weights; nothing in the core imports these."""
