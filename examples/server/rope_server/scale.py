"""Several servers behind one port, by Ray Serve: serve run rope_server.scale:app folder=FOLDER.

Requests go to the replica with the shorter queue of two. A client that names a conversation, or
a prefix that many requests share, in the header `serve_multiplexed_model_id` gets a replica that
has served it before and holds its pages. This is Ray's routing to replicas that hold a model.
"""

from pathlib import Path
from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel, ConfigDict
from ray import serve

from rope_server.app import create_app
from rope_server.engine import Settings

PREFIXES = 1024  # names that a replica remembers


class Arguments(BaseModel):
    """Arguments of `serve run`: the folder of a model, replicas, and threads of each."""

    model_config = ConfigDict(extra="forbid")

    folder: Path
    replicas: int = 2
    threads: int = 1
    settings: Settings = Settings()


# Ray reads the annotation of the argument, which must not be a text.
def app(arguments: Arguments) -> serve.Application:
    """Return the application of Ray Serve."""

    def build() -> FastAPI:
        served = create_app(arguments.folder, arguments.settings)
        served.add_middleware(Remember)
        return served

    # Ray sets OMP_NUM_THREADS to num_cpus, and may import NumPy before this package.
    environment = {"env_vars": {"OPENBLAS_THREAD_TIMEOUT": "8"}}
    deployment = serve.deployment(
        serve.ingress(build)(),
        name="rope_server",
        num_replicas=arguments.replicas,
        max_ongoing_requests=arguments.settings.sequences + arguments.settings.queue,
        ray_actor_options={"num_cpus": arguments.threads, "runtime_env": environment},
    )
    return deployment.bind()


@serve.multiplexed(max_num_models_per_replica=PREFIXES)
async def remembered(name: str) -> str:
    """Let Ray know that this replica has served a name."""
    return name


class Remember:
    """Remember the names in the headers of requests."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Serve a request of ASGI."""
        name = serve.get_multiplexed_model_id() if scope["type"] == "http" else ""
        if name:
            await remembered(name)
        await self._app(scope, receive, send)
