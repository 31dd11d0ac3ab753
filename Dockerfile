# megazero in a container. On a CPU (with --build-arg TORCH="torch==2.13.0 --index-url <index of CPU builds>" it is smaller):
#   docker build --tag megazero . && docker run --rm megazero --help
# For GPUs name an image that has torch, and leave its torch as it is:
#   docker build --build-arg BASE=pytorch/pytorch:2.13.0-cuda12.9-cudnn9-runtime --build-arg TORCH= --tag megazero:cuda .
#   docker run --rm --gpus all --network host --ipc host --volume "$PWD:/work" megazero:cuda train --config run.yaml --nproc-per-node 8
ARG BASE=python:3.12-slim
FROM ${BASE}
ARG TORCH=torch==2.13.0
ENV PIP_NO_CACHE_DIR=1 PIP_ROOT_USER_ACTION=ignore PIP_BREAK_SYSTEM_PACKAGES=1
COPY . /opt/megazero
# TORCH is words of pip's command line; the releases of all else are setup.cfg's.
# hadolint ignore=SC2086,DL3013
RUN if [ -n "${TORCH}" ]; then pip install ${TORCH}; fi \
    && pip install "/opt/megazero[hf]" \
    && rm -rf /opt/megazero \
    && useradd --create-home --uid 1000 megazero \
    && install --directory --owner megazero /work
USER 1000
WORKDIR /work
HEALTHCHECK --interval=5m --timeout=30s CMD ["megazero", "--version"]
ENTRYPOINT ["megazero"]
