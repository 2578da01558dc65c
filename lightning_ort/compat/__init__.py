"""Private and undocumented names of other packages, one module for each package and one function for each use."""
