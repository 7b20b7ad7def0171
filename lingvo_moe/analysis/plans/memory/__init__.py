"""The bytes that a device holds: of the training state, from specs; of a compiled program, from its text."""
