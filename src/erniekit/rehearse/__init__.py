"""A run's calls between ranks, recorded one rank at a time without the others, and compared: do they match, and does no
rank wait for ever? Used by recipes/rehearsal.py; compare.py and blocking.py work on plain lists and import no torch."""
