#!/bin/sh
# Mines hard negatives for three trainers from one scored run: mine_for_trainers.sh FOLDER
# FOLDER is that of bm25.py. The run is scored once; each trainer gets its own form, and other margins need no
# new scores.
set -eu
cd "$1"

score-file --run bm25.trec --queries queries.jsonl --corpus corpus.jsonl --qrels qrels.txt --with-texts \
    --model "${MODEL:-demo}" -o scored.parquet --force --quiet
mine() {
    rankmill mine scored.parquet --min-relevance 2 --relative-margin 0.05 --num-negatives 3 --force "$@"
}
mine --format triplet -o sentence-transformers.parquet
mine --format flagembedding -o flagembedding.jsonl
mine --format tevatron -o tevatron.jsonl
