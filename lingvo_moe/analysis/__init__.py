"""The analysis of programs: it reads what core compiles, and core imports nothing of it."""
