"""Checks of a kernel set on the machine that it is to serve on: every op against `reference`.

`checks` says what is checked, `watch` runs it, `repair` replaces what fails.
"""
