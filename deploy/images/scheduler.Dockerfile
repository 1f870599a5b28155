# The scheduler image; built from the repository's root:
# docker build -f deploy/images/scheduler.Dockerfile -t torchrelay/scheduler:0.2.0 .
FROM python:3.11.10-slim-bookworm AS build
WORKDIR /src
COPY constraints.txt ./
COPY proto ./proto
COPY libs/common ./libs/common
COPY libs/transfer ./libs/transfer
COPY services/scheduler ./services/scheduler
RUN python -m venv /opt/torchrelay \
    && /opt/torchrelay/bin/pip install --no-cache-dir -c constraints.txt hatchling \
    && /opt/torchrelay/bin/pip install --no-cache-dir -c constraints.txt --no-build-isolation ./proto ./libs/common ./libs/transfer ./services/scheduler

FROM python:3.11.10-slim-bookworm
RUN useradd --system --uid 10001 --create-home torchrelay
COPY --from=build /opt/torchrelay /opt/torchrelay
ENV PATH=/opt/torchrelay/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    TORCHRELAY_HOST=0.0.0.0 \
    TORCHRELAY_PORT=7101
USER torchrelay
EXPOSE 7101
HEALTHCHECK --interval=5s --timeout=3s --start-period=60s CMD ["torchrelay-health", "127.0.0.1:7101"]
ENTRYPOINT ["torchrelay-scheduler"]
