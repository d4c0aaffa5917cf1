"""The main job: train a small byte-level GPT on the text of Python's standard library.

Read it top-down: ``cli.command`` takes what was typed, ``cli.rank`` is one rank, ``run.training``
builds what ``run.loop`` repeats, ``model``, ``optim`` and ``watch`` hold the parts.
"""
