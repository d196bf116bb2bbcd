"""Models that no entry of ours describes, computed by transformers' own code over our pool, products and attention.

Promises: no code of a checkpoint runs, nothing is fetched, and a model whose steps differ from the plain one is refused
when it is loaded. Imported only where such a model is served, since transformers takes seconds to import.
"""
