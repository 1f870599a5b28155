# The prefill image. Build from the repository's root: docker build -f deploy/images/prefill.Dockerfile -t torchrelay/prefill:0.1.0 .
FROM python:3.11.10-slim-bookworm AS build
WORKDIR /src
COPY constraints.txt ./
COPY proto ./proto
COPY libs/common ./libs/common
COPY libs/transfer ./libs/transfer
COPY libs/engine ./libs/engine
COPY libs/worker ./libs/worker
COPY services/prefill ./services/prefill
RUN python -m venv /opt/torchrelay \
    && /opt/torchrelay/bin/pip install --no-cache-dir -c constraints.txt hatchling \
    && /opt/torchrelay/bin/pip install --no-cache-dir -c constraints.txt --no-build-isolation ./proto "./libs/common[text]" ./libs/transfer ./libs/engine ./libs/worker ./services/prefill

FROM python:3.11.10-slim-bookworm
RUN useradd --system --uid 10001 --create-home torchrelay
COPY --from=build /opt/torchrelay /opt/torchrelay
ENV PATH=/opt/torchrelay/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    TORCHRELAY_HOST=0.0.0.0
USER torchrelay
ENTRYPOINT ["torchrelay-worker"]
