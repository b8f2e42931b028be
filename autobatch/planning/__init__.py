"""Decides without torch: which size to try next, the memory curve, how a target is divided, when a size changes."""
