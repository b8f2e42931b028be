"""Wraps what is needed of torch's own objects: dispatch modes, storages, its import."""
