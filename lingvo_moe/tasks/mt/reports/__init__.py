"""The HTML page about a run, and the experts that each language is routed to."""
