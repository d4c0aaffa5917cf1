"""The model, split over tensor- and context-parallel ranks, and its objective."""
