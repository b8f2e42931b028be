"""Calls the user's step and reads what it returns; finds what it can reach, and what its losses are means over."""
