"""Tools that look into one program: where its tensors lie, and whether its numbers are right."""
