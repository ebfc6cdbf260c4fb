"""Rows with pictures and videos -> samples: reading, templates, sizes, tokens, positions, packs.

data/media knows files and pixels and nothing of rows or tokens; everything in between is here.
"""
