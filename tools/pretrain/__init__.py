"""The main job: train a small byte-level GPT on the text of Python's standard library.

Start with ``rank``, one rank from its device to its exit code, and ``run.training``, which builds
``run.loop`` from its parts. ``cli`` has the command line, the launcher, signals and consoles.
"""
