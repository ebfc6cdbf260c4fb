"""`erniekit bench`: training speed of this product and of others on one machine, with the same weights and data.

command.py starts a process for each workload (worker.py); docs/performance.md describes the result.
"""
