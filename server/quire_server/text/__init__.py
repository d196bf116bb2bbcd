"""Text and token ids: chat templates, tokenizer, detokenizer, stop strings.

Has no HTTP and no engine.
"""
