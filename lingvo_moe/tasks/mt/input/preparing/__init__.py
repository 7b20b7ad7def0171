"""From parallel text in many forms to a prepared data set: what tools.prepare does."""
