"""Hydra finds a launcher only in a package of this namespace."""
