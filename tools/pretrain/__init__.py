"""The main job: train a small byte-level GPT on the text of Python's standard library.

Start it with ``hatch run pretrain`` (it starts its own ranks), or unchanged under
``torchrun ... -m pretrain`` on a cluster. ``--help`` lists every option.
"""
