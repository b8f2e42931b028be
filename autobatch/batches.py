"""Defines how a batch is read where autobatch cannot see it: types of your own, and lists with two meanings."""

from __future__ import annotations

from autobatch.batch.registry import Fields, Samples, register

__all__ = ["Fields", "Samples", "register"]
