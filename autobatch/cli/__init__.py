"""Implements the command ``autobatch``; ``main`` imports the module of the command that is asked for."""
