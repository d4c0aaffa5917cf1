"""Imported by fork servers: the main job's text and versions, read once for all forked ranks."""

import functools

from pretrain import corpus, settings

corpus.load_corpus = functools.cache(corpus.load_corpus)
corpus.load_corpus(0.05, 0)  # as the main job asks for it by default
settings.surroundings()  # the versions in config.json, which it keeps
