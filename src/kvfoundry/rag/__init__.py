"""Retrieval-augmented generation: find passages, keep their KV, answer from them. This step finds."""

from kvfoundry.rag.dataset import Dataset, load_dataset, passage_id
from kvfoundry.rag.encoders import open_encoder
from kvfoundry.rag.index import PassageIndex
from kvfoundry.rag.retrieval_file import Retrieval
from kvfoundry.rag.retrieve import fill_index, retrieve
from kvfoundry.rag.retrievers import DEFAULT, Retriever

__all__ = [
    "DEFAULT", "Dataset", "PassageIndex", "Retrieval", "Retriever", "fill_index", "load_dataset", "open_encoder",
    "passage_id", "retrieve",
]  # fmt: skip
