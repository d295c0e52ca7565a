# AMD GPUs. Build on an image that has torch 2.11 or newer for ROCm and Python 3.12:
# make image FLAVOUR=rocm ARGS="--build-arg BASE=rocm/pytorch:TAG"
# With --build-arg EXTRAS= too the image gets neither AITER nor MORI, for a base image that has them.
ARG BASE
FROM ${BASE}
ARG EXTRAS=[rocm]

# tini reaps processes that others leave behind.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends tini \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /srv/atom
COPY constraints.txt pyproject.toml README.md LICENSE ./
COPY atom atom
COPY atom_ops atom_ops
COPY engine_core engine_core
COPY frontend frontend
COPY parallel parallel
COPY workers workers
# pip keeps the torch of the image; pyproject.toml has the versions.
# hadolint ignore=DL3013
RUN pip install --no-cache-dir ".${EXTRAS}"

# Another directory than the sources, which would be imported instead of the installed package.
WORKDIR /srv
# A new volume takes its owner from here. HOME is where libraries keep what they compile, as Triton does.
RUN install -d -o 10001 -g 10001 /cache
USER 10001:10001
# AITER compiles kernels when they are first used.
ENV HOME=/cache ATOM_CACHE_DIR=/cache/atom HF_HOME=/cache/huggingface AITER_JIT_DIR=/cache/aiter
EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=10s --retries=9 --start-period=1h \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/health', timeout=5)"]
ENTRYPOINT ["tini", "--", "atom-launch"]
