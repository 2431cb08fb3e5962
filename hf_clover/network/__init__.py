"""The heads themselves: their configuration, their layers, and what they read of a target.

The files are flat siblings and import nothing of the other rooms, because they travel to the Hub together, as remote
code.
"""
