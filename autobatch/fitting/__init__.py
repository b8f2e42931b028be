"""Finds a plan for a model and a target batch by running trials."""
