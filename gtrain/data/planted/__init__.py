"""Generated data whose best possible score is known: graphs, typed graphs, events, knowledge graphs, sparse rows."""

from gtrain.data.planted.graph import PlantedData, PlantedModel, best_accuracy, generate

__all__ = ["PlantedData", "PlantedModel", "best_accuracy", "generate"]
