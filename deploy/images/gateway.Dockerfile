# The gateway image; built from the repository's root:
# docker build -f deploy/images/gateway.Dockerfile -t torchrelay/gateway:0.2.0 .
FROM python:3.11.10-slim-bookworm AS build
WORKDIR /src
COPY constraints.txt ./
COPY proto ./proto
COPY libs/common ./libs/common
COPY libs/modelspec ./libs/modelspec
COPY services/gateway ./services/gateway
RUN python -m venv /opt/torchrelay \
    && /opt/torchrelay/bin/pip install --no-cache-dir -c constraints.txt hatchling \
    && /opt/torchrelay/bin/pip install --no-cache-dir -c constraints.txt --no-build-isolation ./proto './libs/common[grammars,templates,text]' ./libs/modelspec ./services/gateway

FROM python:3.11.10-slim-bookworm
RUN useradd --system --uid 10001 --create-home torchrelay
COPY --from=build /opt/torchrelay /opt/torchrelay
ENV PATH=/opt/torchrelay/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    TORCHRELAY_HOST=0.0.0.0 \
    TORCHRELAY_GRPC_PORT=7301
USER torchrelay
EXPOSE 7301 8080
HEALTHCHECK --interval=5s --timeout=3s --start-period=60s CMD ["torchrelay-health", "127.0.0.1:7301"]
ENTRYPOINT ["torchrelay-gateway"]
