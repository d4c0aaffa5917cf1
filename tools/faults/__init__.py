"""A campaign of faults against the main job: ``hatch run faults --seed S --minutes M``.

``deck`` lists the faults and phases. ``inside`` makes a fault happen in a rank. ``starting`` and
``launchers`` start the ranks as clusters do. ``trial`` runs one job through several faults, and
``verdict`` compares its result with an undisturbed run.
"""
