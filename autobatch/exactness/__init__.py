"""Is splitting a step exact, and if not, why: one small batch, whole against divided in several ways."""
