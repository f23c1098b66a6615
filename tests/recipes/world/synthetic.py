"""A world whose truth is known: a smooth texture around the camera.

The camera turns (the texture slides sideways), looks up and down (it slides vertically) and goes forward (it grows).
Poses, frames and times agree by construction, so whoever estimates one from another can be checked.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

PIXELS_PER_RADIAN = 60.0  # at a height of 48
ZOOM_PER_UNIT = 0.02


class Film(NamedTuple):
    frames: np.ndarray  # (N, H, W, 3) uint8
    poses: np.ndarray  # (N, 4, 4) camera to world; camera x right, y down, z ahead; the world's up is -y
    times: np.ndarray  # (N,) seconds, uneven
    moves: np.ndarray  # (N, 3): forward, turn right, look up of the move that led to the frame; 0 for the first


def film(num_frames: int, seed: int, height: int = 48, width: int = 64, texture: int = 0) -> Film:
    rng = np.random.default_rng((seed, 1))
    waves = np.random.default_rng((texture, 2)).normal(size=(3, 24, 4))
    moves = rng.normal(size=(num_frames, 3)) * (1.0, 0.06, 0.02)  # white, so that a lag is seen at once
    moves[0] = 0
    poses, frames = np.zeros((num_frames, 4, 4)), np.zeros((num_frames, height, width, 3), np.uint8)
    position, yaw, pitch, ahead = np.zeros(3), 0.0, 0.0, 0.0
    for t, (forward, turn, look) in enumerate(moves):
        if abs(ahead + forward) > 12:  # stay where the texture is neither too coarse nor too fine
            forward = moves[t, 0] = -forward
        if abs(pitch + look) > 0.3:
            look = moves[t, 2] = -look
        # The step is made along the old heading, then the camera turns: this is how a relative pose is read.
        position, ahead = position + forward * rotation(yaw, pitch)[:, 2], ahead + forward
        yaw, pitch = yaw + turn, pitch + look
        poses[t, :3, :3], poses[t, :3, 3], poses[t, 3, 3] = rotation(yaw, pitch), position, 1
        frames[t] = look_at(waves, yaw, pitch, ahead, height, width)
    return Film(frames, poses, np.cumsum(rng.uniform(0.045, 0.055, num_frames)) + 1.7e9, moves)


def rotation(yaw: float, pitch: float) -> np.ndarray:
    """Camera to world: yaw to the right about y (down), then pitch up about x (right)."""
    c, s, d, e = np.cos(yaw), np.sin(yaw), np.cos(pitch), np.sin(pitch)
    about_y = np.array([[c, 0, s], [0, 1, 0], [-s, 0, c]])
    about_x = np.array([[1, 0, 0], [0, d, -e], [0, e, d]])
    return about_y @ about_x


def look_at(waves: np.ndarray, yaw: float, pitch: float, ahead: float, height: int, width: int) -> np.ndarray:
    scale = np.exp(-ZOOM_PER_UNIT * ahead) * 48 / height
    y, x = np.mgrid[0:height, 0:width]
    u = (x - (width - 1) / 2) * scale + PIXELS_PER_RADIAN * yaw
    v = (y - (height - 1) / 2) * scale - PIXELS_PER_RADIAN * pitch
    # (3, 24, H, W): waves of 8 to 60 pixels
    phase = waves[..., :1, None] * u * 0.12 + waves[..., 1:2, None] * v * 0.12 + waves[..., 2:3, None] * 6
    value = (np.cos(phase) * waves[..., 3:, None]).sum(1) / 8
    return np.rint(127.5 + 127.5 * np.tanh(value)).astype(np.uint8).transpose(1, 2, 0)
