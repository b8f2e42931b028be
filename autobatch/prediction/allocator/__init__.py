"""The CUDA caching allocator, simulated: what it holds for a sequence of allocations."""
