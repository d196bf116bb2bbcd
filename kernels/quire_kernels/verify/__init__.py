"""Checks of a kernel set on the machine that will serve with it: every op against `reference`.

`checks` defines the checks, `watch` runs them, `repair` replaces ops that fail.
"""
