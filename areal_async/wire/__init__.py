"""Messages between the controller (`router`) and its workers (`dealer`), in one form (`frames`).

Importing this package imports no ZeroMQ; a process that forks before it opens a socket imports `dealer` late.
"""
