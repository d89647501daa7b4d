"""Retrievers: which passages belong to a question. One file for each piece; `recipe.py` combines them."""

from kvfoundry.rag.retrievers.base import Question
from kvfoundry.rag.retrievers.recipe import DEFAULT, Hit, Retriever
from kvfoundry.rag.retrievers.registry import retriever_pieces

__all__ = ["DEFAULT", "Hit", "Question", "Retriever", "retriever_pieces"]
