"""`python -m quire_engine.tools.verify`: checks the kernels and the model's answers on this machine, in JSON."""
