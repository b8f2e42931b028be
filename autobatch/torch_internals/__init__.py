"""What the other packages rely on of torch's own objects: dispatch modes, storages, its import, profiler ranges."""
