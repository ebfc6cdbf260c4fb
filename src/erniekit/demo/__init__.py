"""The offline demo: a tiny model and the data it carries. Run by recipes/demo.py; tests use the tiny model, too."""
