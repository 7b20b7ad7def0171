"""The framework: layers, sharding, engines. It knows nothing of translation."""
