"""Walks through one Freedoom map in ViZDoom and records what it sees. A program of its own, started by episodes.py.

    python -m rung.recipes.world.walk.recorder '{"package": ..., "wad": ..., "map": ..., "seed": ..., ...}'

It has its own process and folder, as ViZDoom is native code that leaves files where it works, and writes `frames.bin`
(raw RGB) and `steps.npy` (one STEP per frame) there. One recording may hold several lives: a new one begins where the
walker leaves the map, dies or is teleported, since no control leads from one such frame to the next.
"""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from rung.recipes.world.walk.walker import CONTROLS, Walker, read_plan

# pose: x, y, z of the camera in map units, yaw, pitch, roll in degrees. The control is applied after the frame.
STEP = np.dtype([("life", "<i4"), ("tic", "<i4"), ("pose", "<f8", 6), ("control", "<f8", len(CONTROLS))])
TICS = 2  # of 1/35 s for which a control is held
SETTLE = 8  # steps without control: at its start the engine ignores turns for some tics
LEAP = 48.0  # map units in a step; a walk has at most 18, what goes further was a teleporter


def open_game(vizdoom: Any, job: dict[str, Any]) -> Any:
    """ViZDoom without a window, a weapon, a status bar or monsters."""
    game = vizdoom.DoomGame()
    game.set_doom_game_path(f"{vizdoom.root_path}/{job['wad']}")
    game.set_doom_map(job["map"])
    game.set_screen_resolution(getattr(vizdoom.ScreenResolution, f"RES_{job['width']}X{job['height']}"))
    game.set_screen_format(vizdoom.ScreenFormat.RGB24)
    for off in ("hud", "weapon", "crosshair", "messages", "screen_flashes", "decals", "particles", "effects_sprites"):
        getattr(game, f"set_render_{off}")(False)
    game.set_window_visible(False)
    game.set_sound_enabled(False)
    button, variable = vizdoom.Button, vizdoom.GameVariable
    game.set_available_buttons(
        [
            button.MOVE_FORWARD_BACKWARD_DELTA, button.MOVE_LEFT_RIGHT_DELTA,
            button.TURN_LEFT_RIGHT_DELTA, button.LOOK_UP_DOWN_DELTA, button.USE,
        ]
    )  # fmt: skip
    game.set_available_game_variables(
        [
            variable.CAMERA_POSITION_X, variable.CAMERA_POSITION_Y, variable.CAMERA_POSITION_Z,
            variable.CAMERA_ANGLE, variable.CAMERA_PITCH, variable.CAMERA_ROLL,
        ]
    )  # fmt: skip
    game.set_episode_timeout(0)
    game.set_seed(job["seed"] % 2**31)
    # A bobbing view would be motion without a control; "a secret is revealed" is written over the picture otherwise.
    game.add_game_args("-nomonsters +movebob 0 +cl_showsecretmessage 0 +con_midtime 0")
    game.init()
    return game


def record(game: Any, walker: Walker, job: dict[str, Any], frames: BinaryIO) -> np.ndarray:
    steps, life, place = np.zeros(job["num_frames"], STEP), -1, np.zeros(2)
    for number in range(len(steps)):
        if number == 0 or game.is_episode_finished():
            if number:
                game.new_episode()
            game.send_game_command("god")  # slime and crushers would end the walk
            game.send_game_command("give keys")
            game.make_action([0.0] * 5, TICS * SETTLE)
            if game.is_episode_finished():
                raise RuntimeError("the map ends as soon as it starts")
            place = np.full(2, np.inf)
        state = game.get_state()
        pose = np.array(state.game_variables, np.float64)
        if not np.hypot(*(pose[:2] - place)) < LEAP:
            life += 1
            walker.start()
        place = pose[:2]
        frames.write(shrink(state.screen_buffer, job["factor"]).tobytes())
        control, is_opening = walker.step(pose)
        steps[number] = (life, state.tic, pose, control)
        game.make_action([*control, float(is_opening)], TICS)
    return steps


def shrink(frame: np.ndarray, factor: int) -> np.ndarray:
    """Means of blocks, halves rounded up; sums of slices, as they are 8 times faster than a sum over two axes."""
    if factor == 1:
        return frame
    total = np.full((frame.shape[0] // factor, frame.shape[1] // factor, 3), factor * factor // 2, np.uint32)
    for row in range(factor):
        for column in range(factor):
            total += frame[row::factor, column::factor]
    return (total // (factor * factor)).astype(np.uint8)


def main() -> None:
    job = json.loads(sys.argv[1])
    if job["package"]:
        sys.path.insert(0, job["package"])
    vizdoom = importlib.import_module("vizdoom")
    walker = Walker(job["seed"], read_plan(Path(vizdoom.root_path) / job["wad"], job["map"]))
    game = open_game(vizdoom, job)
    try:
        with open("frames.bin", "wb") as frames:
            steps = record(game, walker, job, frames)
    finally:
        game.close()
    np.save("steps.npy", steps)


if __name__ == "__main__":
    main()
