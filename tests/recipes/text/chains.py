"""Markov chains with known transition matrices: text whose best possible loss can be computed."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from tests.recipes.text.stores import Document, write_store

NUM_SYMBOLS = 12
CHARACTERS = "".join(chr(ord("a") + n) for n in range(NUM_SYMBOLS))
# Many short held-out documents: windows of one document are alike, and an error over windows would be too small.
DOCUMENTS = {"train": (160, 400), "validation": (20, 60), "test": (300, 60)}


def chains(num_chains: int, seed: int = 0) -> np.ndarray:
    """(chains, symbols, symbols): rows of probabilities. Each chain has symbols it likes, peaked to its own degree."""
    rng = np.random.default_rng(seed)
    made = []
    for n in range(num_chains):
        liked = np.full(NUM_SYMBOLS, 0.15)
        liked[3 * n : 3 * n + 5] += 1.0
        made.append(0.97 * rng.dirichlet(liked * (0.5 + 0.25 * n), size=NUM_SYMBOLS) + 0.03 / NUM_SYMBOLS)
    return np.stack(made)


def independent(seed: int = 0) -> np.ndarray:
    """(1, symbols, symbols): a chain that forgets: every symbol is drawn from one distribution."""
    return np.random.default_rng(seed).dirichlet(np.ones(NUM_SYMBOLS))[None, None].repeat(NUM_SYMBOLS, axis=1)


def stationary(chain: np.ndarray) -> np.ndarray:
    values, vectors = np.linalg.eig(chain.T)
    found = np.real(vectors[:, np.argmin(np.abs(values - 1))])
    return found / found.sum()


def walk(chain: np.ndarray, num_walks: int, length: int, rng: np.random.Generator) -> np.ndarray:
    """(walks, length) symbols, from the stationary distribution on, so that every window looks alike."""
    symbols = np.empty((num_walks, length), dtype=np.int64)
    symbols[:, 0] = rng.choice(NUM_SYMBOLS, size=num_walks, p=stationary(chain))
    cumulated = chain.cumsum(axis=1)
    for t in range(1, length):
        symbols[:, t] = (rng.random(num_walks)[:, None] > cumulated[symbols[:, t - 1]]).sum(axis=1)
    return symbols.clip(0, NUM_SYMBOLS - 1)


def write_chains(out: Path, matrices: np.ndarray, seed: int = 1) -> Path:
    """A store with one category per chain, as characters: the ids are the symbols."""
    rng = np.random.default_rng(seed)
    documents = [
        Document(split, f"chain{number}", symbols)
        for number, chain in enumerate(matrices)
        for split, (count, length) in DOCUMENTS.items()
        for symbols in walk(chain, count, length, rng)
    ]
    return write_store(out, documents, characters=CHARACTERS)


def bayes_losses(matrices: np.ndarray, symbols: np.ndarray) -> np.ndarray:
    """(rows, L) nats: -log sum_c p(c | x_<t) p(x_t | x_<t, c), all chains equally likely at first."""
    posterior = np.stack([stationary(chain)[symbols[:, 0]] for chain in matrices], axis=1)
    posterior = posterior / posterior.sum(axis=1, keepdims=True)
    losses = np.empty((len(symbols), symbols.shape[1] - 1))
    for t in range(1, symbols.shape[1]):
        likelihood = matrices[:, symbols[:, t - 1], symbols[:, t]].T
        joint = posterior * likelihood
        losses[:, t - 1] = -np.log(joint.sum(axis=1))
        posterior = joint / joint.sum(axis=1, keepdims=True)
    return losses
