"""Trains models whose parameters fully_shard has divided: every rank runs the same passes in lockstep."""
