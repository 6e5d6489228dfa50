# Pentad in a container, from the wheel of `make wheel`. `make test` lints this file, `make test-image`
# builds it and runs two steps of the demo in it.
#
#   make wheel
#   docker build -t pentad .                                  # CUDA: torch's wheels bring its libraries
#   docker build -t pentad:cpu --build-arg TORCH=cpu .        # CPU only, 4 GB less
#   docker run --rm pentad:cpu demo
#   docker run --rm --gpus all --ipc=host -v "$PWD:/work" pentad train recipe.yaml
ARG PYTHON=3.12
FROM python:${PYTHON}-slim-bookworm

# Triton and torch.compile need a C compiler.
RUN apt-get update \
 && apt-get install --yes --no-install-recommends gcc g++ libc6-dev \
 && rm -rf /var/lib/apt/lists/*

# cuda: torch as pip's index has it. cpu: from TORCH_INDEX, as PyTorch's page on installing names it.
ARG TORCH=cuda
ARG TORCH_INDEX=""
ARG EXTRAS=all
COPY constraints.txt dist/pentad-*.whl /tmp/pentad/
RUN if [ "$TORCH" = cpu ]; then \
      pip install --no-cache-dir ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} "$(grep '^torch==' /tmp/pentad/constraints.txt)"; \
    fi \
 && pip install --no-cache-dir -c /tmp/pentad/constraints.txt "$(ls /tmp/pentad/pentad-*.whl)[$EXTRAS]" \
 && rm -rf /tmp/pentad

# An index may have another build of torch for this platform than the one that was asked for.
RUN python -c "import sys, torch; built = 'cuda' if torch.version.cuda else 'cpu'; \
    sys.exit(built != '$TORCH' and f'TORCH=$TORCH: pip has torch {torch.__version__} for {built}; name an index with --build-arg TORCH_INDEX=URL')"

# Runs need no root. Mount a folder at /work for recipes, data and runs.
RUN useradd --create-home pentad && mkdir /work && chown pentad /work
USER pentad
WORKDIR /work
ENTRYPOINT ["pentad"]
CMD ["--help"]
