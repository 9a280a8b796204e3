"""Stores: each backend is an fsspec filesystem (`base.py` is the whole interface)."""
