"""Building blocks of self-contained HTML pages: markup, style and drawings."""
