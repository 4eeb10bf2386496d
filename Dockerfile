# docker build -t steno .                        the CPU engine
# docker build -t steno:gpu --target gpu .       an NVIDIA GPU's: run it with --gpus all
FROM python:3.11-slim AS common

# No cache in the image; and its bytecode is made now, since who runs it may not write it.
ENV UV_NO_CACHE=1 PIP_NO_CACHE_DIR=1 UV_COMPILE_BYTECODE=1 STENO_BENCH_DIR=/home/steno/.cache/bench
RUN useradd --create-home --uid 1000 steno && mkdir -p /home/steno/.cache && chown steno: /home/steno/.cache
WORKDIR /srv/steno
COPY . .
VOLUME /home/steno/.cache
EXPOSE 8000
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=30s --timeout=5s --start-period=5m \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/health/live', timeout=4)"]
# It asks for keys: give it some (STENO_API_KEYS, STENO_API_KEYS_FILE), or STENO_WITHOUT_KEYS=true.
CMD [".venv/bin/steno", "serve", "--host", "0.0.0.0"]

# It compiles kernels when it starts.
FROM common AS gpu
ENV STENO_EXTRA=gpu
RUN apt-get update \
    && apt-get install -y --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*
RUN python scripts/setup.py
USER steno

FROM common AS cpu
ENV STENO_EXTRA=cpu
RUN apt-get update \
    && apt-get install -y --no-install-recommends libnuma1 \
    && rm -rf /var/lib/apt/lists/*
RUN python scripts/setup.py
USER steno
