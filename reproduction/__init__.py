"""The paper's systems claims beside plans of the same models: which plans, the paper's figures, the page.

Nothing here imports TensorFlow but what makes plans (making.py): the page is written from recorded ones.
"""
