"""Stages of a module that calls its layers itself, such as a Hugging Face model.

Read `partial_forward` first: each stage runs the module's own `forward`. `absent_modules` stands in for what other
ranks hold; `embeddings_and_heads` finds out which stages need what surrounds the layers.
"""
