# The prefill image; built from the repository's root:
# docker build -f deploy/images/prefill.Dockerfile -t torchrelay/prefill:0.2.0 .
FROM python:3.11.10-slim-bookworm AS build
# pip options that choose the torch build, such as an index of CPU or CUDA wheels; without any, pip takes its default.
ARG TORCH_OPTIONS=""
# For the engine's kernels.
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY constraints.txt ./
COPY proto ./proto
COPY libs/common ./libs/common
COPY libs/modelspec ./libs/modelspec
COPY libs/transfer ./libs/transfer
COPY libs/engine ./libs/engine
COPY libs/worker ./libs/worker
COPY services/prefill ./services/prefill
RUN python -m venv /opt/torchrelay \
    && /opt/torchrelay/bin/pip install --no-cache-dir -c constraints.txt hatchling setuptools \
    && /opt/torchrelay/bin/pip install --no-cache-dir $TORCH_OPTIONS torch==2.13.0 \
    && /opt/torchrelay/bin/pip install --no-cache-dir -c constraints.txt --no-build-isolation ./proto './libs/common[grammars,text]' ./libs/modelspec ./libs/transfer ./libs/engine ./libs/worker ./services/prefill

FROM python:3.11.10-slim-bookworm
# For Triton, which compiles a launcher of each kernel in the container of a worker on a GPU; empty for a worker on a CPU.
ARG COMPILER="gcc libc6-dev"
RUN [ -z "$COMPILER" ] || { apt-get update && apt-get install -y --no-install-recommends $COMPILER && rm -rf /var/lib/apt/lists/*; }
RUN useradd --system --uid 10001 --create-home torchrelay
COPY --from=build /opt/torchrelay /opt/torchrelay
ENV PATH=/opt/torchrelay/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    TORCHRELAY_HOST=0.0.0.0 \
    TORCHRELAY_PORT=7201 \
    TORCHRELAY_ROLES=prefill
USER torchrelay
EXPOSE 7201
HEALTHCHECK --interval=5s --timeout=3s --start-period=60s CMD ["torchrelay-health", "127.0.0.1:7201"]
ENTRYPOINT ["torchrelay-worker"]
