# Converting, exporting and verifying on a CPU. With --build-arg BASE=..., an image that has PyTorch and Transformer Engine,
# training in FP8 on a GPU too: what is installed there already is kept. PyTorch comes with CUDA, some 6 GB; on a BASE that
# has its CPU build, a tenth of that.
ARG BASE=python:3.12-slim
FROM ${BASE}
COPY . /src
RUN pip install --no-cache-dir "/src[train,plots]"
WORKDIR /data
ENTRYPOINT ["precisionctl"]
