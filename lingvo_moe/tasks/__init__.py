"""Tasks: translation, language models and image classification."""
