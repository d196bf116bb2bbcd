"""Thin: one family of endpoints a file.

A route turns its wire model into options and hands it on.
"""
