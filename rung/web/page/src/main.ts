// The play page: puts the parts together. What happens where is in the parts.

import { readChoice, writeChoice } from "./address";
import { Bars } from "./bars";
import { Clip, saveStill } from "./clip";
import { Hands } from "./hands";
import { type About, type Head, type Hello, Line, type Pictures, type Wish } from "./line";
import { Pace, Rate } from "./pace";
import { Panel } from "./panel";
import { Picture } from "./picture";
import { find, setStatus, showMessage } from "./shell";

const choice = readChoice(location.search);
const stage = find("stage");
const picture = new Picture(find<HTMLCanvasElement>("picture"));
const bars = new Bars(find("channels"), find("clamped"));
const clip = new Clip(picture.canvas);
const shown = new Rate();
const hands = new Hands(stage, moved);
hands.touch(find("touch"));
const pace = new Pace(() => {
  hands.readGamepad();
  const isAsked = line.ask(wish);
  stage.dataset["underWay"] = String(line.underWay);
  return isAsked;
});
const panel = new Panel(choice, {
  changed,
  begin,
  setMode,
  pause,
  step: () => (pause(true), pace.owe(1)),
  clip: toggleClip,
  still: () => saveStill(picture.canvas, fileName()),
  hold: () => void hands.hold().catch(() => showMessage("The browser does not hand over the mouse.")),
});
const line = new Line({ hello, answer, error, lost });

let title = "rung";
let about: About | null = null;
let walk = 0; // the number of this walk: answers to an earlier one come too late to be shown
let last: Head | null = null;
let modelMs = NaN; // a running mean
let isAtEnd = false;

function wish(): Wish {
  return {
    walk,
    place: choice.place ?? 0,
    offset: choice.offset ?? 0,
    mode: choice.mode,
    intent: choice.mode === "walk" ? hands.take(choice.speed) : {},
    coding: choice.compress ? "jpeg" : "auto",
  };
}

function hello(said: Hello): void {
  const isFirst = about === null;
  about = said.about;
  title = said.title;
  document.title = find("title").textContent = title;
  hands.intents = about.intents;
  pace.rateHz = about.rate_hz;
  bars.setUp(about.controls);
  picture.size(about.width, about.height);
  panel.setUp(about);
  setStatus("live", "Connected");
  if (isFirst || said.is_known) showMessage("");
  else showMessage("The server no longer knew this walk; it begins again."); // with the next wish, which says where
  pace.owe(1);
}

function answer(head: Head, pictures: Pictures): void {
  stage.dataset["underWay"] = String(line.underWay);
  pace.answered();
  if (head.walk !== walk) return;
  last = head;
  if (head.is_end === true) {
    if (choice.mode !== "follow") return;
    isAtEnd = true;
    pause(true);
    showMessage("The recording ends here. Space begins it again.");
    return;
  }
  modelMs = Number.isNaN(modelMs) ? head.model_ms : 0.9 * modelMs + 0.1 * head.model_ms;
  shown.count(performance.now());
  picture.show(pictures);
  bars.show(head);
  panel.showOffset(head.offset);
  stage.dataset["step"] = String(head.step);
  stage.dataset["place"] = String(head.place);
}

function error(text: string, isFatal: boolean): void {
  if (isFatal) setStatus("failed", "Ended");
  pause(true);
  showMessage(text);
}

function lost(): void {
  setStatus("lost", "Connection lost, trying again");
}

function begin(place: number, offset: number): void {
  walk += 1;
  choice.place = place;
  choice.offset = offset;
  isAtEnd = false;
  showMessage("");
  panel.show();
  changed();
  pace.owe(1);
}

function setMode(mode: "walk" | "follow"): void {
  if (mode === choice.mode) return;
  choice.mode = mode;
  if (isAtEnd) begin(choice.place ?? 0, mode === "follow" ? 0 : choice.offset ?? 0);
  panel.show();
  changed();
  pace.owe(1);
}

function moved(): void {
  find("hint").hidden = true;
  if (choice.mode === "follow") setMode("walk");
}

function pause(isPaused = !pace.isPaused): void {
  if (!isPaused && isAtEnd) begin(choice.place ?? 0, 0);
  pace.isPaused = isPaused;
  panel.showPause(isPaused);
}

function changed(): void {
  pace.isFast = choice.fast;
  picture.isSmooth = choice.smooth;
  picture.hasDifference = choice.difference;
  picture.draw();
  writeChoice(choice);
}

function toggleClip(): void {
  try {
    if (clip.isOn) clip.stop();
    else clip.start(fileName);
  } catch (problem) {
    showMessage(`This browser cannot record a clip: ${String(problem)}`);
  }
  panel.showClip(clip.isOn);
}

function fileName(): string {
  const label = about?.places[choice.place ?? 0]?.label ?? "";
  return `${title} ${label} ${last?.step ?? 0}`.replaceAll(/[^\w.-]+/g, "-");
}

function showRates(): void {
  const rate = shown.perSecond(performance.now());
  const step = last === null ? "" : `step ${last.step}`;
  const model = Number.isNaN(modelMs) ? "" : `model ${modelMs.toFixed(1)} ms, up to ${Math.round(1000 / modelMs)}/s`;
  find("rates").textContent = [step, `${rate} frames/s`, model].filter((part) => part !== "").join("  ·  ");
}

changed();
setInterval(showRates, 250);
pace.start();
line.connect();
stage.focus({ preventScroll: true });
