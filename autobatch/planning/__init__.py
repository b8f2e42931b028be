"""Pure planning: which size to try next, the memory curve, and how a target is divided. Nothing here imports torch."""
