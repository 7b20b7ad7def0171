"""A model exported as a SavedModel, and a translator behind HTTP.

Only export.py and saved_translator.py need TensorFlow; the server does not.
"""
