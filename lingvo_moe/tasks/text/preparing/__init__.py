"""The stages of tools.prepare, from parallel text in many forms to a prepared data set."""
