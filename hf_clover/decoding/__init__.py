"""Tree speculation inside `generate`: the decoding loop with its trees and walks, the target, the heads and the cache.

One step of `loop.speculate`: draft a tree under the last token, verify all of it in one forward of the target, walk
it as plain generate would, commit what was walked.
"""
