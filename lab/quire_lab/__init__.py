"""The laboratory: simulation, planning, diagnosis and exercises, on top of packages that never import it."""
