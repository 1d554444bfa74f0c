"""Children of a run: how they are started (`recipes`), guarded (`guard`) and watched (`child`).

What always holds: no child outlives the controller, however that ends.
"""
