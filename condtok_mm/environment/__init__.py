"""What is installed, what of it runs, and what mends the rest; no import needed."""
