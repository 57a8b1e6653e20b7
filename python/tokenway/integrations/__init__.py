"""Frameworks that run Tokenway: a module for each, and `groups`, which they share. docs/FRAMEWORKS.md is the guide.

Nothing else of the product imports this folder, and none of its modules imports a framework before it is asked to.
"""
