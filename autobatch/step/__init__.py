"""Calls the user's step, reads its losses and their counts, and finds the objects that it can reach."""
