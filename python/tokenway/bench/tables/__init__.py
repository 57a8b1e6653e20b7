"""How runs are shown: a module for each kind of run makes tables and notes of its JSON, and knows nothing else of it.

`tokenway.bench.report` knows which kind a run is, and prints what comes from here.
"""
