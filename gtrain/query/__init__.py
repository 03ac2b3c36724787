"""Questions to a trained knowledge-graph model, with names in and names out: ``gtrain score`` and ``gtrain neighbors``.

``model`` has :class:`TrainedModel`, which answers; ``opening`` reads the folder of a run; ``command`` has the verbs.
"""

from gtrain.lazy import lazy_names

__getattr__, __dir__ = lazy_names(
    __name__, {"TrainedModel": "model", "Answer": "model", "Question": "questions", "NeighborIndex": "index"}
)
