"""Plans of steps for machines, those here and those that are not, and the search for a strategy among them."""
