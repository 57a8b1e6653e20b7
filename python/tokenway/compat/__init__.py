"""Modules with the surface of other libraries, so that code which calls those runs on Tokenway unchanged.

Nothing is put in another library's place unless it is asked for (`tokenway.compat.deep_ep.install`).
"""
