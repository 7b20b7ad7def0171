"""A job of several processes: how they are placed, meet, keep step, end together, and go on with fewer."""
