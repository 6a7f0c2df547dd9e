# rankmill for CPUs. For workers on NVIDIA GPUs, which are faster than Hugging Face's tokenizers:
# docker build --build-arg VARIANT=cuda --build-arg EXTRAS=worker,fast-tokenizers --tag rankmill:cuda .
# To measure a GPU in a container: docs/explanation/benchmarks.md.
# Without workers (score-file, exporter, gateway): docker build --build-arg EXTRAS=gateway,grpc --tag rankmill:base .
FROM python:3.11-slim

# PyTorch for CPUs has an index of its own and is a tenth of the size of the CUDA build on PyPI.
ARG VARIANT=cpu
ARG EXTRAS=worker,gateway,grpc
WORKDIR /opt/rankmill

# What changes seldom comes first: the dependencies, of which torch is gigabytes.
COPY pyproject.toml constraints.txt ./
RUN python -c "import sys, tomllib; project = tomllib.load(open('pyproject.toml', 'rb'))['project']; \
extras = [e for e in sys.argv[1].split(',') if e]; \
print(*project['dependencies'], *(r for e in extras for r in project['optional-dependencies'][e] if not r.startswith('rankmill[')), sep='\n')" \
        "$EXTRAS" > requirements.txt \
    && if [ "$VARIANT" = cpu ]; then set -- --extra-index-url https://download.pytorch.org/whl/cpu; fi \
    && pip install --no-cache-dir --constraint constraints.txt --requirement requirements.txt "$@"

COPY . .
RUN pip install --no-cache-dir --no-deps . \
    && useradd --create-home --uid 1000 rankmill \
    && install -d -o rankmill -g rankmill /home/rankmill/.cache /home/rankmill/data \
    && ln -s /opt/rankmill/configs/docker/entrypoint.sh /usr/local/bin/

# The list of its Python packages, in CycloneDX; Debian's are in /var/lib/dpkg. What makes it does not stay.
RUN python -m venv /tmp/sbom \
    && /tmp/sbom/bin/pip install --no-cache-dir --constraint constraints.txt cyclonedx-bom \
    && install -d /usr/share/sbom \
    && /tmp/sbom/bin/cyclonedx-py environment --output-reproducible --output-file /usr/share/sbom/rankmill.cdx.json \
        "$(command -v python)" \
    && rm -r /tmp/sbom

# RQ connects as rankmill's own commands do.
ENV RQ_CONNECTION_CLASS=rankmill.Connection
# What a container may use of an NVIDIA GPU, where there is one: CUDA, and the library of its metrics.
ENV NVIDIA_DRIVER_CAPABILITIES=compute,utility
USER rankmill
WORKDIR /home/rankmill
EXPOSE 9807 9808 9809
ENTRYPOINT ["entrypoint.sh"]
CMD ["rq", "worker", "rankmill", "--worker-class", "rankmill.ScoringWorker", "--serializer", "json"]
