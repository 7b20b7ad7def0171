"""The process of a command: its flags, its messages, its imports."""
