"""Checks whether splitting a step is exact, and finds why not: one small batch, whole against split in several ways."""
