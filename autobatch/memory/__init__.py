"""Measures and limits the memory of devices, and recognises out-of-memory errors."""
