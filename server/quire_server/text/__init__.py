"""Text and token ids: templates, tokenizer, detokenizer, stop strings.

Knows no HTTP and no engine.
"""
