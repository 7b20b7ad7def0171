"""Machine translation: many languages into one."""
