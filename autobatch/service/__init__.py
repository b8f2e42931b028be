"""Keeps a team's plans, runs and predictions in one place: the server, and the records that travel to it."""
