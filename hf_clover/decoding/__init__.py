"""Tree speculation inside `generate`: tree, walk, loop, and the target, the heads, keys and values behind them.

One step of `loop.speculate`: draft a tree under the last token, verify all of it in one forward of the target, walk
it as plain generate would, commit what was walked.
"""
