"""Imported by fork servers: the built-in text of the main job, read once for all forked ranks."""

import functools

from pretrain import corpus

corpus.load_corpus = functools.cache(corpus.load_corpus)
corpus.load_corpus(0.05, 0)  # as the main job asks for it by default
