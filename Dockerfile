# onramp with everything that its programs and tests need (docs/containers.md).
#
#     docker build --tag onramp .                               # for the CPU
#     docker build --tag onramp --build-arg DEVICE=cuda .       # for an NVIDIA GPU
#     docker run --rm onramp make test ARGS="-k smoke"
FROM debian:bookworm-slim

# A compiler for --compile and Triton, git for the commit in config.json, and EGL and OSMesa for videos.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends ca-certificates g++ git libegl1 libgl1-mesa-dri libosmesa6 make \
        python3 python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*

# A user without privileges owns the folder. With another one (docker run --user), mount a folder for the runs.
RUN useradd --create-home --uid 1000 onramp && mkdir /onramp && chown onramp:onramp /onramp
USER onramp
WORKDIR /onramp

# The requirements first, so that a change of the code does not install them again. PyPI's torch for Linux brings
# CUDA, of some gigabytes. uv finds the same version for the CPU alone.
ARG DEVICE=cpu
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
COPY --chown=onramp:onramp requirements.txt ./
RUN python3 -m venv .venv \
    && case "$DEVICE" in \
        cpu) .venv/bin/pip install uv==0.13.9 \
            && .venv/bin/uv pip install --python .venv/bin/python --torch-backend cpu $(grep '^torch==' requirements.txt) ;; \
        cuda) ;; \
        *) echo "DEVICE is $DEVICE: give cpu or cuda" >&2; exit 2 ;; \
    esac \
    && grep -v '^-e' requirements.txt | .venv/bin/pip install --requirement /dev/stdin
COPY --chown=onramp:onramp . .
RUN make setup .venv/video

# What the NVIDIA Container Toolkit gives a container. It changes nothing without one.
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,graphics,utility
ENV PATH=/onramp/.venv/bin:$PATH
CMD ["make", "help"]
