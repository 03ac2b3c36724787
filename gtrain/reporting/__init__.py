"""``gtrain report``: a self-contained HTML page of a run, or a comparison of several.

It reads the folders of runs (:mod:`gtrain.record.run`) and, where it exists, the store of the graph. ``command`` is the
command; ``page`` renders the templates; the other modules make the figures.
"""
