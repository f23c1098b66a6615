// The page of a music model: a prompt or a clip goes in, a clip comes out.

import { clipCard, decode, packed, takeFiles, unpacked, wav } from "./audio";
import { h, put } from "./lab/dom";
import { ask, find, randomSeed, report, type Run, runs, SEED, Settings, showMessage, startShell } from "./shell";

interface About {
  sample_rate: number;
  most_seconds: number;
  knows_texts: boolean;
  examples: string[];
  usual: { seconds: number; temperature: number; top_k: number; top_p: number; guidance_scale: number };
}

const MOST_GIVEN_S = 60; // the model hears the end of it

startShell([["Ctrl Enter", "make a clip"], ["Esc", "stop"], ["?", "this list"]]);

const prompt = find<HTMLTextAreaElement>("prompt");
let models: Run<About>[] = [];
let settings: Settings;
let given: File | null = null;
let stopping: AbortController | null = null;

async function take(file: File): Promise<void> {
  const rate = models[0]!.about.sample_rate;
  const sound = await decode(file, rate, MOST_GIVEN_S, "end");
  const card = await clipCard(wav(sound, rate), file.name);
  given = file;
  put(find("given"), h("p", { class: "note" }, `${file.name}, ${(sound.length / rate).toFixed(1)} s: it is continued `,
    h("button", { type: "button", onclick: () => ((given = null), put(find("given"))) }, "Take it away")), card);
}

function start(): void {
  if (!settings.isValid) return;
  stopping?.abort();
  const mine = (stopping = new AbortController());
  if (find<HTMLInputElement>("fresh").checked) settings.set("seed", randomSeed());
  const request = { ...settings.values, prompt: prompt.value }, clip = given;
  find("stop").removeAttribute("disabled");
  void report(async () => {
    const row = h("div", { class: "pair", "aria-busy": true });
    row.style.setProperty("--columns", String(models.length));
    find("clips").prepend(row);
    try {
      const work = models.map(async (run, number) => {
        const place = h("section", { class: "card", "aria-label": run.title, "data-state": "busy" }, h("h2", {}, run.title), h("p", { class: "note" }, "Making a clip"));
        row.append(place);
        const sound = clip === null ? "" : packed(await decode(clip, run.about.sample_rate, MOST_GIVEN_S, "end"));
        await ask<{ wav: string; caption: string }>(number, { ...request, sound }, (piece) => void show(place, run, piece), mine.signal);
      });
      const failed = (await Promise.allSettled(work)).find((one) => one.status === "rejected");
      if (failed !== undefined) {
        for (const place of row.querySelectorAll("[data-state='busy']")) place.remove(); // a clip that is there stays
        if (row.childElementCount === 0) row.remove();
        throw failed.reason;
      }
    } finally {
      row.removeAttribute("aria-busy");
      if (stopping === mine) find("stop").setAttribute("disabled", "");
    }
  });
}

async function show(place: HTMLElement, run: Run<About>, piece: { wav: string; caption: string }): Promise<void> {
  const file = new Blob([unpacked(piece.wav)], { type: "audio/wav" });
  const card = await clipCard(file, `${run.name.replaceAll("/", "-")}-${settings.values["seed"]}.wav`);
  put(place, h("h2", {}, run.title), card, h("p", { class: "note" }, piece.caption));
  place.dataset["state"] = "done";
}

find("go").addEventListener("click", start);
find("stop").addEventListener("click", () => stopping?.abort());
addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) start();
  else if (event.key === "Escape") stopping?.abort();
});
takeFiles(find("drop"), find<HTMLInputElement>("file"), (file) => void report(() => take(file)));

models = await runs<About>();
const { usual, most_seconds, examples, knows_texts } = models[0]!.about;
settings = new Settings(find("fields"), [
  { name: "seconds", label: "Seconds", value: usual.seconds, min: 0, max: Math.floor(10 * most_seconds) / 10, step: 0.1, note: `0 is as long as a row of training, ${most_seconds.toFixed(1)} s` },
  { name: "temperature", label: "Temperature", value: usual.temperature, min: 0, max: 10, step: 0.05 },
  { name: "top_k", label: "Top-k", value: usual.top_k, min: 0, max: 1e6, step: 1 },
  { name: "top_p", label: "Top-p", value: usual.top_p, min: 0.01, max: 1, step: 0.01 },
  { name: "guidance_scale", label: "Guidance", value: usual.guidance_scale, min: 0, max: 100, step: 0.5, note: "How much the text is stressed" },
  SEED,
]);
const list = find<HTMLSelectElement>("examples");
put(list, h("option", { value: "" }, "choose"), examples.map((text) => h("option", { value: text }, text.slice(0, 60))));
list.addEventListener("change", () => list.value !== "" && (prompt.value = list.value));
if (!knows_texts) showMessage("This run has learned from music without texts: what the prompt says makes no difference.");
