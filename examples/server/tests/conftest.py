"""Fixtures: small models and random numbers."""

from __future__ import annotations

import numpy as np
import pytest
from models import MODELS, Model


@pytest.fixture(scope="session", params=MODELS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    """Each of the small models."""
    return Model(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Model:
    """The small Llama alone."""
    return Model("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> np.random.Generator:
    """Random numbers that depend on the name of the test alone."""
    return np.random.default_rng(list(request.node.name.encode()))
