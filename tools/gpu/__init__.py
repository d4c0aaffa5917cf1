"""The check of a machine with one GPU: tests, benchmark rows and the main job, without network.

Run ``bash tools/gpu/run.sh FOLDER``. It takes at most ten minutes and writes ``gpu.md`` and
``gpu.jsonl`` into the folder. ``limits`` is the pytest plugin, ``rows`` the benchmark.
"""
