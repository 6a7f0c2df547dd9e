# rankmill for CPUs. For workers on NVIDIA GPUs, with tokenizers that are fast enough for a GPU:
# docker build --build-arg VARIANT=cuda --build-arg EXTRAS=worker,fast-tokenizers --tag rankmill:cuda .
# To measure a GPU in a container: docs/explanation/benchmarks.md.
# Without workers (score-file, exporter, gateway): docker build --build-arg EXTRAS=gateway,grpc --tag rankmill:base .
FROM python:3.11-slim

# PyTorch for CPUs has an index of its own, and is far smaller than the CUDA build on PyPI (docs/start.md).
ARG VARIANT=cpu
ARG EXTRAS=worker,gateway,grpc
WORKDIR /opt/rankmill

# Dependencies change seldom and are large, so they have a layer of their own.
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

# The list of the image's Python packages (CycloneDX); Debian's packages are listed in /var/lib/dpkg. The tool that
# makes the list is removed again.
RUN python -m venv /tmp/sbom \
    && /tmp/sbom/bin/pip install --no-cache-dir --constraint constraints.txt cyclonedx-bom \
    && install -d /usr/share/sbom \
    && /tmp/sbom/bin/cyclonedx-py environment --output-reproducible --output-file /usr/share/sbom/rankmill.cdx.json \
        "$(command -v python)" \
    && rm -r /tmp/sbom

# The rq command uses rankmill's connections, which wait for a server that is away.
ENV RQ_CONNECTION_CLASS=rankmill.Connection
# With an NVIDIA GPU, the container may use CUDA and the library for the GPU's metrics.
ENV NVIDIA_DRIVER_CAPABILITIES=compute,utility
USER rankmill
WORKDIR /home/rankmill
EXPOSE 9807 9808 9809
ENTRYPOINT ["entrypoint.sh"]
CMD ["rq", "worker", "rankmill", "--worker-class", "rankmill.ScoringWorker", "--serializer", "json"]
