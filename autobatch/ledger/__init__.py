"""Stores plans and runs as files, from one start of a script to the next."""
