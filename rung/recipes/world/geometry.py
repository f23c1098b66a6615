"""Poses and the moves between them.

A pose is a 4x4 camera-to-world matrix in float64; the camera's x is right, y is down, z is ahead. A move leads from one
pose to the next, seen from the first camera: three lengths and a rotation vector. The maps between the two are exact,
also for tiny turns and half turns. Pitch is positive when looking up; ViZDoom's is positive when looking down.
"""

from __future__ import annotations

import numpy as np

MOVES = ("right", "down", "forward", "look_up", "turn_right", "lean_right")
CHANNELS = (*MOVES, "roll", "pitch", "dt", "valid")  # the controls that poses give, in the order of the store
_FLIP = np.diag([1.0, -1.0, -1.0, 1.0])  # opengl has y up and looks along -z


# Rotations


def to_matrix(turn: np.ndarray) -> np.ndarray:
    """(..., 3) rotation vectors to (..., 3, 3) matrices."""
    angle = np.linalg.norm(turn, axis=-1)[..., None, None]
    cross = _cross(turn)
    # sin(a) / a and (1 - cos(a)) / a^2; numpy's sinc is exact at 0 and is defined with a factor of pi
    return np.eye(3) + np.sinc(angle / np.pi) * cross + 0.5 * np.sinc(angle / (2 * np.pi)) ** 2 * (cross @ cross)


def to_vector(matrix: np.ndarray) -> np.ndarray:
    """(..., 3, 3) rotations to (..., 3) vectors, of length pi at most."""
    w, xyz = np.split(to_quaternion(matrix), [1], axis=-1)
    sine = np.linalg.norm(xyz, axis=-1, keepdims=True)
    small = sine < 1e-12
    # the half angle over its sine tends to 1: no division near 0, and no arc cosine anywhere
    return 2 * xyz * np.where(small, 1.0, np.arctan2(sine, w) / np.where(small, 1.0, sine))


def to_quaternion(matrix: np.ndarray) -> np.ndarray:
    """(..., 3, 3) rotations to (..., 4) unit quaternions w, x, y, z with w >= 0."""
    m = np.asarray(matrix, np.float64)
    xx, yy, zz = m[..., 0, 0], m[..., 1, 1], m[..., 2, 2]
    wx, wy, wz = m[..., 2, 1] - m[..., 1, 2], m[..., 0, 2] - m[..., 2, 0], m[..., 1, 0] - m[..., 0, 1]
    xy, xz, yz = m[..., 0, 1] + m[..., 1, 0], m[..., 0, 2] + m[..., 2, 0], m[..., 1, 2] + m[..., 2, 1]
    # Four times the quaternion's outer product with itself: its row with the largest square has no cancellation.
    squares = np.stack([1 + xx + yy + zz, 1 + xx - yy - zz, 1 - xx + yy - zz, 1 - xx - yy + zz], axis=-1)
    rows = [[squares[..., 0], wx, wy, wz], [wx, squares[..., 1], xy, xz]]
    rows += [[wy, xy, squares[..., 2], yz], [wz, xz, yz, squares[..., 3]]]
    table = np.stack([np.stack(row, axis=-1) for row in rows], axis=-2)
    best = np.nan_to_num(squares).argmax(-1)[..., None, None]
    chosen = np.take_along_axis(table, best, axis=-2)[..., 0, :]
    chosen = chosen / np.linalg.norm(chosen, axis=-1, keepdims=True)
    return np.where(chosen[..., :1] < 0, -chosen, chosen)


def from_quaternion(quaternion: np.ndarray) -> np.ndarray:
    """(..., 4) quaternions w, x, y, z of any length to (..., 3, 3)."""
    q = np.asarray(quaternion, np.float64)
    w, xyz = np.split(q / np.linalg.norm(q, axis=-1, keepdims=True), [1], axis=-1)
    cross = _cross(xyz)
    return np.eye(3) + 2 * w[..., None] * cross + 2 * (cross @ cross)


def _cross(v: np.ndarray) -> np.ndarray:
    """The matrix that takes the cross product with v."""
    x, y, z = np.moveaxis(np.asarray(v, np.float64), -1, 0)
    o = np.zeros_like(x)
    return np.stack([o, -z, y, z, o, -x, -y, x, o], axis=-1).reshape(*x.shape, 3, 3)


# Moves


def move_between(before: np.ndarray, after: np.ndarray) -> np.ndarray:
    """(..., 6): the step and the turn from one pose to the next, in the axes of the camera before it."""
    back = np.swapaxes(before[..., :3, :3], -1, -2)
    step = back @ (after[..., :3, 3] - before[..., :3, 3])[..., None]
    return np.concatenate([step[..., 0], to_vector(back @ after[..., :3, :3])], axis=-1)


def apply_move(pose: np.ndarray, move: np.ndarray) -> np.ndarray:
    """The pose after a move: the inverse of `move_between`."""
    return pose @ make_pose(to_matrix(move[..., 3:]), move[..., :3])


def roll_and_pitch(poses: np.ndarray, up: np.ndarray) -> np.ndarray:
    """(..., 2) radians against the vertical: roll > 0 leans right, pitch > 0 looks up."""
    x, y, z = np.moveaxis((np.swapaxes(poses[..., :3, :3], -1, -2) @ np.asarray(up, np.float64)), -1, 0)
    return np.stack([np.arctan2(-x, -y), np.arctan2(z, np.hypot(x, y))], axis=-1)


def interpolate(poses: np.ndarray, share: np.ndarray) -> np.ndarray:
    """Poses (N, 2, 4, 4) to (N, 4, 4): `share` of the way from the first to the second, straight and at even speed."""
    turn = to_vector(np.swapaxes(poses[:, 0, :3, :3], -1, -2) @ poses[:, 1, :3, :3])
    position = poses[:, 0, :3, 3] + share[:, None] * (poses[:, 1, :3, 3] - poses[:, 0, :3, 3])
    return make_pose(poses[:, 0, :3, :3] @ to_matrix(turn * share[:, None]), position)


# Poses as other programs write them


def make_pose(rotation: np.ndarray, position: np.ndarray) -> np.ndarray:
    pose = np.zeros((*np.shape(position)[:-1], 4, 4))
    pose[..., :3, :3], pose[..., :3, 3], pose[..., 3, 3] = rotation, position, 1
    return pose


def from_angles(values: np.ndarray) -> np.ndarray:
    """(..., 6) x, y, z, yaw, pitch, roll in degrees, as ViZDoom has them: z is up, yaw turns left from +x, positive
    pitch looks down. Roll is never used there; we let it lean right."""
    values = np.asarray(values, np.float64)
    yaw, pitch, roll = np.radians(np.moveaxis(values[..., 3:], -1, 0))
    c, s, o = np.cos(yaw), np.sin(yaw), np.zeros_like(yaw)
    level = np.stack([s, o, c, -c, o, s, o, o - 1, o], axis=-1).reshape(*yaw.shape, 3, 3)  # columns: right, down, ahead
    tilt = to_matrix(np.stack([-pitch, o, o], axis=-1)) @ to_matrix(np.stack([o, o, roll], axis=-1))
    return make_pose(level @ tilt, values[..., :3])


def from_numbers(values: np.ndarray, axes: str) -> np.ndarray:
    """(N, 6), (N, 7), (N, 12) or (N, 16) numbers to (N, 4, 4): angles as above; x, y, z, qx, qy, qz, qw; the first
    three rows of a matrix; the whole matrix. `axes` are the camera's in the last three: opencv or opengl."""
    values = np.asarray(values, np.float64)
    kind = values.shape[-1]
    if kind == 6:
        return from_angles(values)
    if kind == 7:
        poses = make_pose(from_quaternion(values[:, [6, 3, 4, 5]]), values[:, :3])
    elif kind == 12:
        rows = values.reshape(-1, 3, 4)
        poses = make_pose(rows[..., :3], rows[..., 3])
    elif kind == 16:
        poses = values.reshape(-1, 4, 4)
        known = np.isfinite(poses).all((1, 2))
        if not (poses[known, 3] == (0, 0, 0, 1)).all() and (poses[known, :, 3] == (0, 0, 0, 1)).all():
            poses = np.swapaxes(poses, -1, -2).copy()  # written column by column, as simd and OpenGL do
    else:
        raise ValueError(f"a pose has 6, 7, 12 or 16 numbers, not {kind}")
    return poses @ _FLIP if axes == "opengl" else poses


def is_rigid(poses: np.ndarray, tolerance: float = 1e-3) -> np.ndarray:
    """(N,) whether each is a rotation and a place; files with few digits are allowed for."""
    turn = poses[:, :3, :3]
    with np.errstate(invalid="ignore"):
        square = np.abs(turn @ np.swapaxes(turn, -1, -2) - np.eye(3)).max((1, 2)) < tolerance
    finite = np.isfinite(poses).all((1, 2))
    bottom = (poses[:, 3] == (0, 0, 0, 1)).all(1)
    return finite & square & bottom & (np.linalg.det(np.where(finite[:, None, None], turn, 0)) > 0)


def nearest_rotation(poses: np.ndarray) -> np.ndarray:
    """The same poses with rotations that are orthogonal to the last digit, so that moves reproduce them."""
    left, _, right = np.linalg.svd(poses[:, :3, :3])
    return make_pose(left @ right, poses[:, :3, 3])
