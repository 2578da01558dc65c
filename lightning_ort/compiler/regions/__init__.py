"""The parts of a graph that one executor runs: the cut, and a part as torch runs it or as a script."""
