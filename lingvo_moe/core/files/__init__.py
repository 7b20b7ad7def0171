"""Files and directories: written atomically, listed with digests, cached."""
