// The page of a piano model: a visitor plays, the model goes on; what is heard and what is seen share one clock.

import { unpacked } from "./audio";
import { Keys } from "./keys";
import { css, h, put, save } from "./lab/dom";
import { audio, type Note, Player } from "./lab/sound";
import { ask, find, isTyping, randomSeed, readWord, report, requireSecure, type Run, runs, SEED, Settings, startShell, writeWord } from "./shell";

interface About {
  low: number;
  high: number;
  most_tokens: number;
  tasks: { name: string; parameters: { name: string; low: number; high: number; usual: number }[] }[];
  composers: string[];
  usual: { temperature: number; top_k: number; top_p: number; num_tokens: number };
}

interface Take {
  title: string;
  given: Note[];
  made: Note[];
  caption: string;
  midi: string;
}

const PAUSE_MS = 1500; // of playing, after which the model goes on
const LEAST_S = 8; // of the roll

startShell([
  ["Z S X … M", "white and black keys, from C; , L . ; / go on"],
  ["Q 2 W … P", "an octave higher"],
  ["← →", "an octave down, up"],
  ["Enter", "let the model go on"],
  ["Space", "play what there is, stop"],
  ["Backspace", "clear"],
  ["?", "this list"],
]);

const roll = find<HTMLCanvasElement>("roll");
const task = find<HTMLSelectElement>("task");
const composer = find<HTMLSelectElement>("composer");
const keys = new Keys(find("keys"), down, up);
const player = new Player(moved);
let models: Run<About>[] = [];
let settings: Settings;
let phrase: Note[] = []; // what was played: start and end in seconds since the first key, key, velocity
let beganMs = 0;
const held = new Map<number, number>(); // key -> its note in the phrase
let takes: Take[] = [];
let shown: Take | null = null;
let pausing = 0;
let asking: AbortController | null = null;

// Playing

function down(key: number, velocity: number, atMs: number): void {
  if (takes.length > 0 || asking !== null) clear(); // a new phrase
  if (player.isPlaying) player.silence();
  clearTimeout(pausing);
  if (phrase.length === 0) beganMs = atMs;
  up(key, atMs);
  clearTimeout(pausing); // which that may have begun
  const at = Math.max(0, (atMs - beganMs) / 1000);
  held.set(key, phrase.length);
  phrase.push([at, at, key, velocity]);
  keys.sound(key, velocity);
  keys.show(key, true);
  roll.dataset["state"] = "listening";
  requestAnimationFrame(drawHeld);
}

function up(key: number, atMs: number): void {
  const index = held.get(key);
  if (index === undefined) return;
  held.delete(key);
  phrase[index]![1] = Math.max(phrase[index]![0] + 0.02, (atMs - beganMs) / 1000);
  keys.release(key);
  keys.show(key, false);
  clearTimeout(pausing);
  if (held.size === 0 && find<HTMLInputElement>("auto").checked) pausing = window.setTimeout(goOn, PAUSE_MS);
}

function drawHeld(nowMs: number): void {
  const at = Math.max(0, (nowMs - beganMs) / 1000);
  for (const index of held.values()) phrase[index]![1] = Math.max(phrase[index]![0], at);
  draw(phrase, [], null);
  if (held.size > 0) requestAnimationFrame(drawHeld);
}

function clear(): void {
  asking?.abort();
  clearTimeout(pausing);
  player.silence();
  for (const key of [...held.keys()]) {
    keys.release(key);
    keys.show(key, false);
  }
  held.clear();
  keys.clear();
  phrase = [];
  takes = [];
  shown = null;
  put(find("takes"));
  for (const id of ["play", "save"]) find(id).setAttribute("disabled", "");
  roll.dataset["state"] = "empty";
  draw([], [], null);
}

// The model

function goOn(): void {
  clearTimeout(pausing);
  if (!settings.isValid) return;
  asking?.abort();
  const mine = (asking = new AbortController());
  for (const key of [...held.keys()]) up(key, performance.now());
  clearTimeout(pausing);
  player.silence();
  if (find<HTMLInputElement>("fresh").checked) settings.set("seed", randomSeed());
  const parameters = [...find("parameters").querySelectorAll("input")].map((input) => Number(input.value));
  const chosen = models[0]!.about.tasks.find((one) => one.name === task.value);
  const usual = chosen?.parameters.every((one, index) => one.usual === parameters[index]);
  const { temperature, top_k, top_p, num_tokens, seed } = settings.values;
  const request = {
    notes: phrase.map(([start, end, key, velocity]) => [start, end, key, velocity]), temperature, top_k, top_p, num_tokens, seed,
  };
  // Runs beside each other need not have learned the same.
  const asked = ({ tasks, composers }: About): object => ({
    ...request,
    ...(tasks.some((one) => one.name === task.value) && { task: task.value, parameters: usual === true ? [] : parameters }),
    ...(composers.length > 0 && { composer: composer.value }),
  });
  takes = [];
  put(find("takes"));
  roll.dataset["state"] = "thinking";
  find("caption").textContent = "The model is thinking …";
  void report(async () => {
    try {
      const work = models.map((run, number) =>
        ask<Omit<Take, "title">>(number, asked(run.about), (piece) => arrived({ ...piece, title: run.title }, mine), mine.signal));
      const failed = (await Promise.allSettled(work)).find((one) => one.status === "rejected");
      if (failed !== undefined) throw failed.reason;
    } finally {
      if (asking !== mine && asking !== null) return; // a later request shows how it is
      asking = null;
      if (takes.length === 0) find("caption").textContent = "";
      if (roll.dataset["state"] === "thinking") roll.dataset["state"] = phrase.length > 0 ? "listening" : "empty";
    }
  });
}

function arrived(take: Take, mine: AbortController): void {
  if (mine.signal.aborted) return;
  takes.push(take);
  takes.sort((a, b) => models.findIndex((run) => run.title === a.title) - models.findIndex((run) => run.title === b.title));
  if (takes.length === 1) {
    choose(take);
    player.seek(from(take));
    player.play();
  }
  put(find("takes"), models.length > 1 && takes.map((one) =>
    h("button", { type: "button", "aria-pressed": one === shown, onclick: () => choose(one) }, `${one.title}: ${one.made.length} notes`)));
}

/** A moment before the model comes in, or from the beginning where it plays among what was given. */
function from(take: Take): number {
  const first = Math.min(...take.made.map(([start]) => start)), last = Math.max(0, ...take.given.map(([start]) => start));
  return Number.isFinite(first) && first >= last ? Math.max(0, first - 1) : 0;
}

function choose(take: Take): void {
  shown = take;
  const notes = [...take.given, ...take.made].sort((a, b) => a[0] - b[0]);
  player.take({ seconds: Math.max(0.1, ...notes.map(([, end]) => end)), notes });
  find("caption").textContent = take.caption;
  find("play").removeAttribute("disabled");
  find("save").toggleAttribute("disabled", take.midi === "");
  roll.dataset["given"] = String(take.given.length);
  roll.dataset["made"] = String(take.made.length);
  roll.dataset["state"] = "answered";
  for (const button of find("takes").children) button.setAttribute("aria-pressed", String(button.textContent?.startsWith(`${take.title}:`)));
  moved();
}

// Seeing

/** What is heard now: the clock of the sound, less the time it takes to the ear. */
function heardAt(): number {
  return Math.max(0, player.position - (player.isPlaying ? audio().outputLatency || 0 : 0));
}

function moved(): void {
  if (shown === null) return;
  const at = heardAt();
  draw(shown.given, shown.made, at);
  const sounding = new Set([...shown.given, ...shown.made].filter(([start, end]) => player.isPlaying && start <= at && at < end).map(([, , key]) => key));
  keys.showOnly(sounding);
  roll.dataset["at"] = at.toFixed(3);
  roll.dataset["playing"] = String(player.isPlaying);
  const button = find("play");
  button.setAttribute("aria-pressed", String(player.isPlaying));
  button.firstChild!.textContent = player.isPlaying ? "Stop " : "Play ";
}

function draw(given: Note[], made: Note[], at: number | null): void {
  const ratio = Math.min(2, devicePixelRatio || 1), width = Math.round(roll.clientWidth * ratio), height = Math.round(roll.clientHeight * ratio);
  if (roll.width !== width || roll.height !== height) [roll.width, roll.height] = [width, height];
  const ctx = roll.getContext("2d")!, all = [...given, ...made];
  const seconds = Math.max(LEAST_S, ...all.map(([, end]) => end + 0.5));
  const low = Math.min(48, ...all.map(([, , key]) => key - 2)), high = Math.max(84, ...all.map(([, , key]) => key + 2));
  const row = height / (high - low + 1), x = (time: number): number => (time / seconds) * width;
  ctx.fillStyle = css("--back");
  ctx.fillRect(0, 0, width, height);
  ctx.fillStyle = css("--track");
  for (let key = low; key <= high; key += 1) if ([1, 3, 6, 8, 10].includes(key % 12)) ctx.fillRect(0, (high - key) * row, width, row);
  ctx.fillStyle = css("--edge");
  for (let second = 1; second < seconds; second += 1) ctx.fillRect(x(second), 0, 1, height);
  const now = css("--warn");
  for (const [notes, colour] of [[given, css("--quiet")], [made, css("--accent")]] as const) {
    for (const [start, end, key, velocity] of notes) {
      const isHeard = at !== null && start <= at && at < end;
      ctx.globalAlpha = isHeard ? 1 : 0.4 + 0.5 * (velocity / 127);
      ctx.fillStyle = isHeard ? now : colour;
      ctx.fillRect(x(start), (high - key) * row + 0.5, Math.max(3, x(end) - x(start) - 1), Math.max(3, row - 1));
    }
  }
  ctx.globalAlpha = 1;
  if (at !== null) {
    ctx.fillStyle = css("--text");
    ctx.fillRect(x(at), 0, Math.max(1, ratio), height);
  }
}

roll.addEventListener("pointerdown", (event) => {
  if (shown === null) return;
  const seconds = Math.max(LEAST_S, ...[...shown.given, ...shown.made].map(([, end]) => end + 0.5));
  player.seek((event.offsetX / roll.clientWidth) * seconds);
});
addEventListener("resize", () => (shown === null ? draw(phrase, [], null) : moved()));
addEventListener("theme", () => (shown === null ? draw(phrase, [], null) : moved()));

// MIDI

async function listenToMidi(): Promise<void> {
  requireSecure("MIDI keyboard");
  if (!("requestMIDIAccess" in navigator)) throw new Error("this browser has no Web MIDI; Chrome, Edge and Firefox do");
  let access: MIDIAccess;
  try {
    access = await navigator.requestMIDIAccess();
  } catch {
    throw new Error("the browser does not let this page use a MIDI keyboard; allow it in the page's settings");
  }
  const pedalled = new Set<number>();
  let hasPedal = false;
  const heard = (event: MIDIMessageEvent): void => {
    const [status = 0, first = 0, second = 0] = event.data ?? [];
    const kind = status & 0xf0;
    if (kind === 0x90 && second > 0) {
      pedalled.delete(first);
      down(first, second, event.timeStamp);
    } else if (kind === 0x80 || kind === 0x90) {
      if (hasPedal) pedalled.add(first);
      else up(first, event.timeStamp);
    } else if (kind === 0xb0 && first === 64) {
      hasPedal = second >= 64;
      if (hasPedal) return;
      for (const key of pedalled) up(key, event.timeStamp);
      pedalled.clear();
    }
  };
  const connect = (): void => {
    const names: string[] = [];
    for (const input of access.inputs.values()) {
      input.onmidimessage = heard;
      names.push(input.name ?? "MIDI");
    }
    find("midi").textContent = names.length > 0 ? names.join(", ") : "No MIDI keyboard is plugged in";
    find("midi").setAttribute("aria-pressed", String(names.length > 0));
  };
  access.onstatechange = connect;
  connect();
}

// Buttons and keys

find("go").addEventListener("click", goOn);
find("play").addEventListener("click", () => player.toggle());
find("clear").addEventListener("click", clear);
find("lower").addEventListener("click", () => keys.shift(-1));
find("higher").addEventListener("click", () => keys.shift(1));
find("midi").addEventListener("click", () => void report(listenToMidi));
find("save").addEventListener("click", () => {
  if (shown !== null) save(new Blob([unpacked(shown.midi)], { type: "audio/midi" }), `${shown.title.replaceAll(/[^\w.-]+/g, "-")}.mid`);
});
addEventListener("keydown", (event) => {
  if (isTyping(event) || event.key === "?" || event.ctrlKey || event.metaKey || event.altKey) return;
  const isButton = event.target instanceof HTMLButtonElement && !event.target.classList.contains("pianokey");
  const commands: Record<string, () => void> = {
    Enter: goOn,
    Backspace: clear,
    Space: () => shown !== null && player.toggle(),
    ArrowLeft: () => keys.shift(-1),
    ArrowRight: () => keys.shift(1),
  };
  const command = commands[event.code];
  if (command === undefined) {
    if (keys.press(event)) event.preventDefault();
  } else if (!isButton || event.code === "Backspace") {
    event.preventDefault();
    if (!event.repeat) command();
  }
});
addEventListener("keyup", (event) => keys.lift(event));
addEventListener("blur", () => {
  keys.letGo(); // the browser does not say when they are lifted
  for (const key of [...held.keys()]) up(key, performance.now());
});

function showParameters(): void {
  const chosen = models[0]!.about.tasks.find((one) => one.name === task.value);
  put(find("parameters"), (chosen?.parameters ?? []).map((one) =>
    h("label", { class: "field" }, h("span", {}, one.name), h("input", { type: "number", min: one.low, max: one.high, step: 1, value: one.usual }))));
}

models = await runs<About>();
const { about } = models[0]!;
keys.build(about.low, about.high);
put(task, about.tasks.map((one) => h("option", { value: one.name }, one.name.replaceAll("_", " "))));
find("task-field").hidden = about.tasks.length === 0;
if (about.tasks.some((one) => one.name === (readWord("task") ?? "continuation"))) task.value = readWord("task") ?? "continuation";
task.addEventListener("change", () => (writeWord("task", task.value), showParameters()));
showParameters();
put(composer, h("option", { value: "" }, "any"), about.composers.map((name) => h("option", { value: name }, name)));
find("composer-field").hidden = about.composers.length === 0;
settings = new Settings(find("fields"), [
  { name: "temperature", label: "Temperature", value: about.usual.temperature, min: 0, max: 10, step: 0.05 },
  { name: "top_k", label: "Top-k", value: about.usual.top_k, min: 0, max: 1e6, step: 1 },
  { name: "top_p", label: "Top-p", value: about.usual.top_p, min: 0.01, max: 1, step: 0.01 },
  { name: "num_tokens", label: "Tokens", value: about.usual.num_tokens, min: 1, max: about.most_tokens, step: 1, note: "A note takes about five" },
  SEED,
]);
clear();
