# A worker for CPUs. PyTorch comes from its CPU index: a tenth of the size of the CUDA build.
FROM python:3.11-slim
COPY . /rankmill
RUN pip install --no-cache-dir --constraint /rankmill/constraints.txt \
        --extra-index-url https://download.pytorch.org/whl/cpu /rankmill \
    && useradd --create-home rankmill
USER rankmill
WORKDIR /home/rankmill
RUN mkdir -p .cache/huggingface
CMD ["rq", "worker", "rankmill", "--worker-class", "workers.ScoringWorker", "--serializer", "json"]
