"""Trains by a plan: runs each step as a whole or not at all, makes the update, and reports both as events."""
