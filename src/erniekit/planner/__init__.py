"""Memory and time of a run before it is started: which layouts of a cluster fit, and how fast each would be.

Numbers in, numbers out: no config, no device, no ranks. recipes/planning.py makes a Job of a run's config and model;
`erniekit plan` and the trainer's own decisions on memory use the same code. docs/planner.md has terms and errors.
"""
