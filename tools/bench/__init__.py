"""Same-run benchmarks: our code and a peer's, one after the other in one process.

Run ``hatch run bench`` for all suites, ``hatch run bench SUITE ...`` for some. A suite is a module
in ``bench.suites`` with a function ``run()`` that yields ``bench.measure.Row`` objects. The page
shows its docstring around the table.
"""
