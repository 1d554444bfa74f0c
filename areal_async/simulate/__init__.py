"""Runs that don't fit here, in virtual time: the same core and routing, with models of service times for workers.

What always holds: every decision of a simulated run is made by `core`, as in a real one; a model only says how long
something takes and how long an answer gets. The same plan and seed give the same figures, on any machine.
"""
