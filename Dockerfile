# rpg on a GPU machine.
#
#   docker build -t rpg .
#   docker run --gpus all --shm-size 8g -v "$PWD/runs:/work/runs" rpg train
#   docker run --gpus all --shm-size 8g -v "$PWD/runs:/work/runs" -v "$PWD/models:/models" rpg \
#       train --config gsm8k/qwen2.5-coder-0.5b/dapo --model /models/qwen2.5-coder-0.5b
#
# torch's own wheels bring CUDA along, so the image needs no CUDA beside them: only the driver of the machine, which
# the NVIDIA container toolkit lends it. gcc is for Triton, which compiles its launchers when a kernel is first run.
FROM python:3.12-slim-bookworm

RUN apt-get update \
 && apt-get install -y --no-install-recommends gcc libc6-dev \
 && rm -rf /var/lib/apt/lists/*

ENV NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility \
    PIP_NO_CACHE_DIR=1 \
    PIP_DISABLE_PIP_VERSION_CHECK=1

# torch first, in a layer of its own: it is 3 GB, and changes with the list alone
COPY constraints.txt /src/
RUN pip install --no-compile -c /src/constraints.txt torch

COPY pyproject.toml README.md LICENSE /src/
COPY scripts /src/scripts
COPY recipes /src/recipes
COPY src /src/src
RUN pip install --no-compile -c /src/constraints.txt "/src[train,peft,gguf]"

WORKDIR /work
VOLUME /work/runs
ENTRYPOINT ["rpg"]
CMD ["train"]
