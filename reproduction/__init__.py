"""Generates the page that compares the paper's systems claims with plans of the same models.

Only making.py, which makes plans, imports TensorFlow: the page is written from recorded plans.
"""
