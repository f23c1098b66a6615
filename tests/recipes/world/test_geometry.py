"""If this fails, a model gets other moves than the camera made."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rung.recipes.world import geometry
from tests.recipes.world.synthetic import film

coordinate = st.floats(-1e4, 1e4)
angle = st.one_of(st.floats(-np.pi, np.pi), st.floats(-1e-9, 1e-9), st.sampled_from([0.0, np.pi, -np.pi, np.pi / 2]))
axis = st.tuples(*[st.floats(-1, 1)] * 3).filter(lambda v: np.linalg.norm(v) > 1e-3)


@st.composite
def turns(draw: st.DrawFn) -> np.ndarray:
    direction = np.array(draw(axis))
    return direction / np.linalg.norm(direction) * draw(angle)


@st.composite
def poses(draw: st.DrawFn) -> np.ndarray:
    place = np.array([draw(coordinate) for _ in range(3)])
    return geometry.make_pose(geometry.to_matrix(draw(turns())), place)


def matrix_exponential(turn: np.ndarray) -> np.ndarray:
    x, y, z = turn
    return torch.linalg.matrix_exp(torch.tensor([[0, -z, y], [z, 0, -x], [-y, x, 0]], dtype=torch.float64)).numpy()


@given(turns())
def test_rotation_vectors_are_exponents(turn: np.ndarray) -> None:
    matrix = geometry.to_matrix(turn)
    np.testing.assert_allclose(matrix, matrix_exponential(turn), atol=1e-13)
    # the vector may come back as the other way round a half turn, so the matrices are compared
    vector = geometry.to_vector(matrix)
    np.testing.assert_allclose(matrix_exponential(vector), matrix, atol=1e-13)
    assert np.linalg.norm(vector) <= np.pi + 1e-12


@given(turns().filter(lambda v: np.linalg.norm(v) < 3.1))
def test_the_logarithm_keeps_every_digit(turn: np.ndarray) -> None:
    np.testing.assert_allclose(geometry.to_vector(geometry.to_matrix(turn)), turn, rtol=1e-9, atol=1e-15)


@given(poses(), poses())
def test_a_move_reproduces_the_pose_it_leads_to(before: np.ndarray, after: np.ndarray) -> None:
    move = geometry.move_between(before, after)
    np.testing.assert_allclose(geometry.apply_move(before, move), after, rtol=1e-11, atol=1e-9)
    relative = np.linalg.inv(before) @ after
    np.testing.assert_allclose(move[:3], relative[:3, 3], atol=1e-7)  # inv loses digits at 1e4


@given(turns(), st.tuples(*[st.floats(-2, 2)] * 3))
def test_quaternions_turn_as_hamilton_says(turn: np.ndarray, vector: tuple[float, ...]) -> None:
    half = np.linalg.norm(turn) / 2
    w, xyz = np.cos(half), turn / 2 * np.sinc(half / np.pi)
    v = np.array(vector)
    cross = np.cross(xyz, v)
    turned = v + 2 * w * cross + 2 * np.cross(xyz, cross)
    matrix = geometry.from_quaternion(np.array([w, *xyz]) * 3)  # of any length
    np.testing.assert_allclose(matrix @ v, turned, atol=1e-12)
    back = geometry.to_quaternion(matrix)
    np.testing.assert_allclose(geometry.from_quaternion(back), matrix, atol=1e-14)


def test_the_moves_of_a_film_with_known_truth() -> None:
    reel = film(60, seed=3, height=8, width=8)
    moves = geometry.move_between(reel.poses[:-1], reel.poses[1:])
    np.testing.assert_allclose(moves[:, 2], reel.moves[1:, 0], atol=1e-9)
    np.testing.assert_allclose(moves[:, :2], 0, atol=1e-9)
    np.testing.assert_allclose(moves[:, 4], reel.moves[1:, 1], atol=0.01)  # pitch bends a turn a little
    np.testing.assert_allclose(moves[:, 3], reel.moves[1:, 2], atol=0.005)
    assert np.corrcoef(moves[:, 3], reel.moves[1:, 2])[0, 1] > 0.99
    lean = geometry.roll_and_pitch(reel.poses, np.array([0.0, -1, 0]))
    np.testing.assert_allclose(lean[:, 0], 0, atol=1e-12)
    np.testing.assert_allclose(lean[:, 1], np.cumsum(reel.moves[:, 2]), atol=1e-12)


@pytest.mark.parametrize(("channel", "sign"), [("look_up", 1), ("turn_right", 1), ("lean_right", 1)])
def test_signs_are_what_the_names_say(channel: str, sign: int) -> None:
    move = np.zeros(6)
    move[geometry.MOVES.index(channel)] = 0.3
    pose = geometry.apply_move(np.eye(4), move)
    right, down, ahead = pose[:3, 0], pose[:3, 1], pose[:3, 2]
    expected = {"look_up": -ahead[1], "turn_right": ahead[0], "lean_right": right[1]}
    assert expected[channel] * sign == pytest.approx(np.sin(0.3))
    roll, pitch = geometry.roll_and_pitch(pose, np.array([0.0, -1, 0]))
    assert (roll, pitch) == pytest.approx((0.3 * (channel == "lean_right"), 0.3 * (channel == "look_up")))
    assert down @ np.cross(ahead, right) == pytest.approx(1)


def test_vizdoom_angles() -> None:
    """z is up, yaw turns left from +x, positive pitch looks down."""
    east, north, down = geometry.from_angles(np.array([[1, 2, 3, 0, 0, 0], [0, 0, 0, 90, 0, 0], [0, 0, 0, 0, 30, 0]]))
    np.testing.assert_allclose(east[:3, 2], [1, 0, 0], atol=1e-15)
    np.testing.assert_allclose(east[:3, 0], [0, -1, 0], atol=1e-15)
    np.testing.assert_allclose(east[:3, 3], [1, 2, 3])
    np.testing.assert_allclose(north[:3, 2], [0, 1, 0], atol=1e-15)
    np.testing.assert_allclose(down[:3, 2], [np.cos(np.pi / 6), 0, -0.5], atol=1e-15)
    up = np.array([0.0, 0, 1])
    assert geometry.roll_and_pitch(down, up)[1] == pytest.approx(-np.pi / 6)
    assert geometry.move_between(north, east)[4] == pytest.approx(np.pi / 2)  # from north to east is to the right
    assert geometry.roll_and_pitch(geometry.from_angles(np.array([0, 0, 0, 77, -20, 10])), up) == pytest.approx(
        np.radians([10, 20])
    )


def test_other_programs_matrices() -> None:
    reel = film(5, seed=1, height=8, width=8)
    flat = reel.poses.reshape(5, 16)
    np.testing.assert_array_equal(geometry.from_numbers(flat, "opencv"), reel.poses)
    np.testing.assert_array_equal(geometry.from_numbers(flat[:, :12], "opencv"), reel.poses)
    columns = np.swapaxes(reel.poses, 1, 2).reshape(5, 16)
    np.testing.assert_array_equal(geometry.from_numbers(columns, "opencv"), reel.poses)
    quaternions = geometry.to_quaternion(reel.poses[:, :3, :3])[:, [1, 2, 3, 0]]
    seven = np.concatenate([reel.poses[:, :3, 3], quaternions], axis=1)
    np.testing.assert_allclose(geometry.from_numbers(seven, "opencv"), reel.poses, atol=1e-12)
    (level,) = geometry.from_numbers(np.eye(4).reshape(1, 16), "opengl")
    np.testing.assert_array_equal(level[:3, 2], [0, 0, -1])  # looks along -z
    np.testing.assert_array_equal(level[:3, 1], [0, -1, 0])  # y was up
    with pytest.raises(ValueError, match="6, 7, 12 or 16"):
        geometry.from_numbers(np.zeros((1, 5)), "opencv")


@given(poses(), poses(), st.floats(0, 1))
def test_interpolation_goes_straight_and_evenly(first: np.ndarray, last: np.ndarray, share: float) -> None:
    (between,) = geometry.interpolate(np.stack([first, last])[None], np.array([share]))
    move, part = geometry.move_between(first, last), geometry.move_between(first, between)
    np.testing.assert_allclose(part[:3], share * move[:3], atol=1e-8)
    if np.linalg.norm(move[3:]) < 3.1:  # beyond, either way round is as short
        np.testing.assert_allclose(part[3:], share * move[3:], atol=1e-8)


def test_matrices_with_few_digits_become_rotations() -> None:
    rough = film(20, seed=2, height=8, width=8).poses.round(4)
    assert geometry.is_rigid(rough).all()
    exact = geometry.nearest_rotation(rough)
    np.testing.assert_allclose(
        exact[:, :3, :3] @ exact[:, :3, :3].swapaxes(1, 2), np.eye(3)[None].repeat(20, 0), atol=1e-14
    )
    np.testing.assert_allclose(exact, rough, atol=2e-4)
    mirrored, scaled = np.diag([1.0, 1, -1, 1]), np.diag([2.0, 2, 2, 1])
    assert not geometry.is_rigid(np.stack([mirrored, scaled, np.full((4, 4), np.nan)])).any()
