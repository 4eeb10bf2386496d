# docker build -t steno .                            the CPU engine
# docker build -t steno:gpu --build-arg EXTRA=gpu .  an NVIDIA GPU's: run it with --gpus all
FROM python:3.11-slim

ARG EXTRA=cpu
# No cache in the image; and its bytecode is made now, since who runs it may not write it.
ENV STENO_EXTRA=$EXTRA UV_NO_CACHE=1 PIP_NO_CACHE_DIR=1 UV_COMPILE_BYTECODE=1

# On a GPU the engine compiles kernels when it starts; on a CPU it links libnuma.
RUN apt-get update \
    && if [ "$EXTRA" = gpu ]; then needed="gcc libc6-dev"; else needed=libnuma1; fi \
    && apt-get install -y --no-install-recommends $needed \
    && rm -rf /var/lib/apt/lists/*

RUN useradd --create-home steno && mkdir -p /home/steno/.cache && chown steno: /home/steno/.cache
WORKDIR /srv/steno
COPY . .
RUN python scripts/setup.py

USER steno
VOLUME /home/steno/.cache
EXPOSE 8000
HEALTHCHECK --interval=30s --timeout=5s --start-period=5m \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/health/live', timeout=4)"]
CMD [".venv/bin/steno", "serve", "--host", "0.0.0.0"]
