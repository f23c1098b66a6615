# rung on a CPU, or on a GPU with its container runtime. A lab lies in /lab:
#   docker build -t rung .
#   docker run --rm -it -v "$PWD/lab:/lab" rung data piano
#   docker run --rm -it -v "$PWD/lab:/lab" rung train piano
#   docker run --rm -it -v "$PWD/lab:/lab" -p 8000:8000 -e RUNG_TOKEN=... rung serve --host 0.0.0.0 --no-open
FROM python:3.12-slim

# git keeps the code of a run as a commit; without it a run has a copy.
RUN apt-get update \
    && apt-get install -y --no-install-recommends git \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /opt/rung
COPY constraints.txt pyproject.toml hatch_build.py README.md LICENSE ./
# torch first and through the constraints file, in a layer that an edit of rung leaves alone.
RUN pip install --no-cache-dir -c constraints.txt torch
COPY rung ./rung
RUN pip install --no-cache-dir -c constraints.txt '.[start]'

RUN useradd --create-home rung && mkdir /lab && chown rung /lab
USER rung
WORKDIR /lab
EXPOSE 8000
ENTRYPOINT ["rung"]
CMD ["--help"]
