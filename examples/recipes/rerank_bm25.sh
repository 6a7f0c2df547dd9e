#!/bin/sh
# Reranks a BM25 run, and measures the gain: rerank_bm25.sh FOLDER
# FOLDER is that of bm25.py, or has your own files with these names. The environment may have MODEL, and
# REDIS_URL if workers wait there.
set -eu
cd "$1"

score-file --run bm25.trec --queries queries.jsonl --corpus corpus.jsonl --depth 20 \
    --model "${MODEL:-demo}" -o reranked.trec --force --quiet
rankmill evaluate reranked.trec --qrels qrels.txt --run bm25.trec
