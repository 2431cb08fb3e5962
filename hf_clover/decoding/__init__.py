"""Tree speculation inside `generate`: tree, cache, drafting, verify, walk, loop, support, hook.

One step of `loop.speculate`: draft a tree under the last token, verify all of it in one forward of the target, walk
it as plain generate would, commit what was walked.
"""
