"""GShard for TensorFlow 2: Mixture-of-Experts Transformers, annotated once and partitioned by XLA on any devices."""
