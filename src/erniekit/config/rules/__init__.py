"""Small named rules, one topic per file; resolve.py lists them in the order they apply."""
