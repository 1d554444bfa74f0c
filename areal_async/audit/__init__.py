"""Proves from a run's log alone that the promises of the run were kept: `auditor.audit`. What is proven: docs/audit.md.

It knows the log and the messages, and nothing of the core: it works out for itself what must have happened.
"""
