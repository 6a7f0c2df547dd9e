#!/bin/sh
# Scores pairs with two teachers in one pass, for a student: distil.sh FOLDER FIRST SECOND
# FOLDER is that of bm25.py, and FIRST and SECOND are models. `score_mean` is the mean of both scores, each
# standardized within its query; MarginMSE and KL losses take such rows.
set -eu
cd "$1"

score-file --run bm25.trec --queries queries.jsonl --corpus corpus.jsonl --qrels qrels.txt --with-texts \
    --model "$2" --model "$3" --mean scores --activation identity \
    -o teachers.parquet --force --quiet
rankmill mine teachers.parquet --score-column score_mean --min-relevance 2 --num-negatives 3 \
    --format n-tuple --with-scores -o student.parquet --force
