"""Runs a function over many samples, in the largest pieces that fit."""
