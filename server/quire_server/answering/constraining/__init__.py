"""What a request asks of its answer's form, as one grammar: schemas reviewed, calls of tools and thoughts put around.

The files here know no HTTP and start nothing; `constraints` is what the rest uses.
"""
