"""The layers of a Transformer: pure functions of (theta, inputs), annotated by einsum letters."""
