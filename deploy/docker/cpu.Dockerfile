# CPUs. Build: make image
# torch's build for CPUs is a tenth of the size: ARGS="--build-arg TORCH=torch==VERSION+cpu --build-arg
# PIP_EXTRA_INDEX_URL=URL", with its index.
FROM python:3.12-slim-bookworm

# tini reaps processes that others leave behind.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ tini \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /srv/atom
COPY constraints.txt pyproject.toml README.md LICENSE ./
# torch alone first: this layer changes rarely, and is by far the largest.
ARG TORCH=""
ARG PIP_EXTRA_INDEX_URL=""
RUN pip install --no-cache-dir "${TORCH:-$(grep '^torch==' constraints.txt)}"
COPY atom atom
COPY atom_ops atom_ops
COPY engine_core engine_core
COPY frontend frontend
COPY parallel parallel
COPY workers workers
RUN pip install --no-cache-dir -c constraints.txt .

# Another directory than the sources, which would be imported instead of the installed package.
WORKDIR /srv
# A new volume takes its owner from here. HOME is where libraries keep what they compile, as Triton does.
RUN install -d -o 10001 -g 10001 /cache
USER 10001:10001
ENV HOME=/cache ATOM_CACHE_DIR=/cache/atom HF_HOME=/cache/huggingface
EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=10s --retries=9 --start-period=1h \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/health', timeout=5)"]
ENTRYPOINT ["tini", "--", "atom-launch"]
