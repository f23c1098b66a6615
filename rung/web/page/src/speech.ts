// The page of a speech model: it hears a recording or a clip, writes down what is said, and answers a question.

import { clipCard, decode, packed, takeFiles, wav } from "./audio";
import { h, put } from "./lab/dom";
import { ask, find, isTyping, report, requireSecure, type Run, runs, setStatus, Settings, startShell } from "./shell";

interface About {
  sample_rate: number;
  most_seconds: number;
  can_ask: boolean;
  usual: { num_tokens: number; beams: number };
}

interface Piece {
  task: string;
  text: string;
  is_cut: boolean;
}

startShell([["R", "record; again to stop and ask"], ["Enter", "in the question: ask"], ["?", "this list"]]);

const question = find<HTMLInputElement>("question");
const button = find<HTMLButtonElement>("record");
let models: Run<About>[] = [];
let settings: Settings;
let sound: Float32Array | null = null;
let recording: { stop(): Promise<Float32Array> } | null = null;
let isStarting = false; // while the browser asks whether it may

/** Samples as they are, without what browsers do to voices: it changes the level. */
async function record(rate: number, mostSeconds: number): Promise<{ stop(): Promise<Float32Array> }> {
  requireSecure("microphone");
  const stream = await navigator.mediaDevices.getUserMedia({
    audio: { channelCount: 1, echoCancellation: false, noiseSuppression: false, autoGainControl: false },
  });
  let context: AudioContext | null = null;
  const release = async (): Promise<void> => {
    for (const track of stream.getTracks()) track.stop();
    await context?.close();
    find<HTMLMeterElement>("level").value = 0;
  };
  const parts: Float32Array[] = [];
  let num = 0, peak = 0, node: AudioWorkletNode;
  try {
    context = new AudioContext({ sampleRate: rate });
    await context.audioWorklet.addModule(new URL("./recorder.js", import.meta.url));
    node = new AudioWorkletNode(context, "recorder", { numberOfOutputs: 0 });
    node.port.onmessage = (event: MessageEvent<Float32Array>) => {
      parts.push(event.data);
      num += event.data.length;
      peak = Math.max(0.9 * peak, ...event.data.map(Math.abs));
      find<HTMLMeterElement>("level").value = peak;
      find("seconds").textContent = `${(num / rate).toFixed(1)} s`;
      if (num >= mostSeconds * rate) void toggle();
    };
    context.createMediaStreamSource(stream).connect(node);
    await context.resume();
  } catch (problem) {
    await release();
    throw problem;
  }
  return {
    async stop(): Promise<Float32Array> {
      node.port.onmessage = null;
      await release();
      const whole = new Float32Array(num);
      let at = 0;
      for (const part of parts) {
        whole.set(part, at);
        at += part.length;
      }
      return whole;
    },
  };
}

async function toggle(): Promise<void> {
  const { sample_rate, most_seconds } = models[0]!.about;
  if (recording !== null) {
    const mine = recording;
    recording = null;
    showRecording();
    if (await report(async () => take(await mine.stop(), "recording.wav"))) start();
    return;
  }
  if (isStarting) return;
  isStarting = true;
  await report(async () => {
    try {
      recording = await record(sample_rate, most_seconds);
    } catch (problem) {
      if (problem instanceof DOMException && problem.name === "NotAllowedError") throw new Error("the browser does not let this page use the microphone; allow it, or drop a clip");
      if (problem instanceof DOMException && problem.name === "NotFoundError") throw new Error("there is no microphone; drop a clip");
      throw problem;
    } finally {
      isStarting = false;
    }
  });
  showRecording();
}

function showRecording(): void {
  button.setAttribute("aria-pressed", String(recording !== null));
  button.firstChild!.textContent = recording === null ? "Record " : "Stop and ask ";
  if (recording !== null) setStatus("busy", "Recording");
}

async function take(found: Float32Array, name: string): Promise<void> {
  const { sample_rate, most_seconds } = models[0]!.about;
  sound = found;
  find("go").removeAttribute("disabled");
  const seconds = found.length / sample_rate, cut = seconds >= most_seconds ? `, cut to the ${most_seconds} s this run has learned` : "";
  put(find("given"), h("p", { class: "note" }, `${name}, ${seconds.toFixed(1)} s${cut}`), await clipCard(wav(found, sample_rate), name));
}

function start(): void {
  if (sound === null || !settings.isValid) return;
  const request = { ...settings.values, sound: packed(sound), question: question.value.trim() };
  void report(async () => {
    const places = models.map((run) => h("section", { class: "card answer", "aria-label": run.title, "data-state": "busy" }, h("h2", {}, run.title)));
    put(find("answers"), places);
    const work = models.map(async (run, number) => {
      const place = places[number]!;
      try {
        await ask<Piece>(number, run.about.can_ask ? request : { ...request, question: "" }, (piece) => {
          const label = piece.task === "asr" ? "Transcript" : request.question;
          place.append(h("p", { class: "note" }, label), h("p", { class: "said", "data-task": piece.task }, piece.text.trim() === "" ? "(nothing)" : piece.text));
        });
      } finally {
        place.dataset["state"] = "done";
      }
    });
    const failed = (await Promise.allSettled(work)).find((one) => one.status === "rejected");
    if (failed !== undefined) throw failed.reason;
  });
}

button.addEventListener("click", () => void toggle());
find("go").addEventListener("click", start);
question.addEventListener("keydown", (event) => event.key === "Enter" && start());
addEventListener("keydown", (event) => {
  if (event.key.toLowerCase() !== "r" || isTyping(event) || event.repeat || event.ctrlKey || event.metaKey || event.altKey) return;
  event.preventDefault();
  void toggle();
});
takeFiles(find("drop"), find<HTMLInputElement>("file"), (file) => void report(async () => {
  const { sample_rate, most_seconds } = models[0]!.about;
  await take(await decode(file, sample_rate, most_seconds), file.name);
}).then((isDone) => isDone && start()));

models = await runs<About>();
const { usual, most_seconds, can_ask } = models[0]!.about;
settings = new Settings(find("fields"), [
  { name: "num_tokens", label: "Tokens", value: usual.num_tokens, min: 1, max: 2000, step: 1, note: "Of an answer, at most" },
  { name: "beams", label: "Beams", value: usual.beams, min: 1, max: 16, step: 1, note: "Answers followed at the same time; 1 is greedy" },
]);
question.disabled = !can_ask;
if (!can_ask) question.placeholder = "this run has learned no questions";
find("limits").textContent = `It hears up to ${most_seconds} s.`;
find("answers").style.setProperty("--columns", String(models.length));
