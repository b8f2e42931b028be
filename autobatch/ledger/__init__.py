"""Stores plans and runs in SQLite, from one start of a script to the next."""
