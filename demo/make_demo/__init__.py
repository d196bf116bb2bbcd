"""What made quire-demo: a grammar that writes the corpus, and the training.

Run by hand, once; nothing that serves imports it.
"""
