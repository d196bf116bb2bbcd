"""`python -m quire_engine.tools.verify`: whether this machine computes what it should, asked and answered in JSON."""
