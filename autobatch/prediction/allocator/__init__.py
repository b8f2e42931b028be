"""Simulates the CUDA caching allocator: what it holds for a sequence of allocations."""
