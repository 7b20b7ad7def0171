"""The framework: layers, sharding, engines. It imports no task."""
