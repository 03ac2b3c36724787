"""Generated data with a known best possible score: graphs, heterogeneous graphs, events, knowledge graphs, rows."""

from gtrain.data.planted.graph import PlantedData, PlantedModel, best_accuracy, generate

__all__ = ["PlantedData", "PlantedModel", "best_accuracy", "generate"]
