// Clips: out of files and into them, as the server takes and gives them, and how they are shown.

import { h, save } from "./lab/dom";
import { spectrogram } from "./lab/sound";

/** A file's sound at another rate, its channels mixed to one; of a long one the start or the end. */
export async function decode(file: Blob, rate: number, mostSeconds: number, part: "start" | "end" = "start"): Promise<Float32Array> {
  let found: AudioBuffer;
  try {
    found = await new OfflineAudioContext(1, 1, rate).decodeAudioData(await file.arrayBuffer()); // at its own rate
  } catch {
    throw new Error("the browser cannot read this file as sound");
  }
  const num = Math.max(1, Math.min(found.length, Math.floor(mostSeconds * rate)));
  const first = part === "end" ? Math.max(0, found.length - num) : 0;
  const mixed = new Float32Array(num);
  for (let channel = 0; channel < found.numberOfChannels; channel += 1) {
    const one = found.getChannelData(channel);
    for (let at = 0; at < num; at += 1) mixed[at] = mixed[at]! + one[first + at]! / found.numberOfChannels;
  }
  return mixed;
}

/** 16-bit samples, as base64. */
export function packed(sound: Float32Array): string {
  const bytes = new Uint8Array(pcm(sound).buffer);
  let text = "";
  for (let at = 0; at < bytes.length; at += 0x8000) text += String.fromCharCode(...bytes.subarray(at, at + 0x8000));
  return btoa(text);
}

function pcm(sound: Float32Array): Int16Array<ArrayBuffer> {
  return Int16Array.from(sound, (value) => Math.round(32767 * Math.max(-1, Math.min(1, value))));
}

export function unpacked(base64: string): Uint8Array<ArrayBuffer> {
  return Uint8Array.from(atob(base64), (letter) => letter.charCodeAt(0));
}

export function wav(sound: Float32Array, rate: number): Blob {
  const samples = pcm(sound), head = new DataView(new ArrayBuffer(44));
  const word = (at: number, text: string): void => [...text].forEach((letter, i) => head.setUint8(at + i, letter.charCodeAt(0)));
  word(0, "RIFF");
  head.setUint32(4, 36 + samples.byteLength, true);
  word(8, "WAVEfmt ");
  head.setUint32(16, 16, true);
  head.setUint16(20, 1, true);
  head.setUint16(22, 1, true);
  head.setUint32(24, rate, true);
  head.setUint32(28, 2 * rate, true);
  head.setUint16(32, 2, true);
  head.setUint16(34, 16, true);
  word(36, "data");
  head.setUint32(40, samples.byteLength, true);
  return new Blob([head, samples], { type: "audio/wav" });
}

/** A clip with its spectrogram, a player, and a line on it that says where one is. */
export async function clipCard(file: Blob, name: string): Promise<HTMLElement> {
  const canvas = h("canvas", { class: "spectrogram", role: "img", "aria-label": "Spectrogram" }), at = h("i", { class: "at" });
  const sound = h("audio", { controls: true, src: URL.createObjectURL(file) });
  const seen = h("div", { class: "seen", onclick: (event: Event) => {
    const box = canvas.getBoundingClientRect();
    sound.currentTime = ((event as MouseEvent).clientX - box.left) / box.width * sound.duration;
  } }, canvas, at);
  const move = (): void => {
    at.style.left = `${100 * (sound.currentTime / (sound.duration || 1))}%`;
    if (!sound.paused) requestAnimationFrame(move);
  };
  sound.addEventListener("play", move);
  sound.addEventListener("seeked", move);
  const buffer = await new OfflineAudioContext(1, 1, 44100).decodeAudioData(await file.arrayBuffer());
  spectrogram(buffer, canvas);
  const button = h("button", { type: "button", onclick: () => save(file, name) }, "Save .wav");
  return h("div", { class: "clip", "data-seconds": buffer.duration.toFixed(3) }, seen, h("div", { class: "row" }, sound, button));
}

/** Files that are dropped on an element or chosen. */
export function takeFiles(into: HTMLElement, chooser: HTMLInputElement, take: (file: File) => void): void {
  for (const name of ["dragenter", "dragover"]) {
    addEventListener(name, (event) => {
      event.preventDefault();
      into.dataset["is"] = "over";
    });
  }
  addEventListener("dragleave", () => delete into.dataset["is"]);
  addEventListener("drop", (event) => {
    event.preventDefault();
    delete into.dataset["is"];
    const file = event.dataTransfer?.files[0];
    if (file !== undefined) take(file);
  });
  chooser.addEventListener("change", () => {
    const file = chooser.files?.[0];
    if (file !== undefined) take(file);
    chooser.value = "";
  });
}
