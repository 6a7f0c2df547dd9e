#!/bin/sh
# Rerank a BM25 run, and measure the gain: rerank_bm25.sh FOLDER (of bm25.py; or your own files of these names).
# MODEL, and REDIS_URL if workers wait there, are variables of the environment.
set -eu
cd "$1"

score-file --run bm25.trec --queries queries.jsonl --corpus corpus.jsonl --depth 20 \
    --model "${MODEL:-demo}" -o reranked.trec --force --quiet
rankmill evaluate reranked.trec --qrels qrels.txt --run bm25.trec
