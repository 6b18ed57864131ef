# Training on a host with NVIDIA GPUs and the NVIDIA container toolkit: docs/release.md, "In a container".
FROM python:3.12-slim-bookworm

# torch brings CUDA's libraries, the host its driver; Triton compiles its kernels with the C compiler, of any version.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*

ENV NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility \
    PYTHONUNBUFFERED=1

WORKDIR /opt/spear-rl
COPY pyproject.toml README.md LICENSE ./
COPY src ./src
ARG EXTRAS=train,lora
# The versions are pyproject.toml's.
# hadolint ignore=DL3013
RUN pip install --no-cache-dir ".[${EXTRAS}]"

RUN useradd --create-home --uid 1000 spear && install --directory --owner=spear /workspace
USER 1000
WORKDIR /workspace
ENTRYPOINT ["spear"]
CMD ["doctor"]
