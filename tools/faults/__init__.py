"""A campaign of faults against the main job: ``hatch run faults --seed S --minutes M``.

``deck`` is what can happen and where, ``inside`` makes it happen in a rank, ``starting`` starts the
ranks as clusters do, ``trial`` takes one run through several faults to its end, and ``verdict``
compares what is left with an undisturbed run.
"""
