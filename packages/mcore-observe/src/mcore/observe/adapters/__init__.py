"""The log of a run and the detector of slow ranks in other libraries' trainers, a module each."""
