"""Pages that can be mailed around: what they are made of, their style and their drawings."""
