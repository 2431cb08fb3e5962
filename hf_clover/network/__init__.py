"""The heads themselves: their configuration, their layers, and the parts of a target that they read.

The files are flat siblings and import nothing from the other rooms, because they are pushed to the Hub together as
remote code.
"""
