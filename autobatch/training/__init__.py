"""Trains by a plan: runs each step as a transaction, makes the update, and reports both as events."""
