// Sound: what a file's samples are, how they look over time and pitch, and one player for several clips at one moment.

import { colour } from "./heat";
import { isDark } from "./dom";

let context: AudioContext | null = null;

export function audio(): AudioContext {
  context ??= new AudioContext();
  return context;
}

const decoded = new Map<string, Promise<AudioBuffer>>();

/** Of a file; the last eight stay decoded. */
export function clip(url: string): Promise<AudioBuffer> {
  let found = decoded.get(url);
  if (found === undefined) {
    found = (async () => {
      const response = await fetch(url);
      if (!response.ok) throw new Error(`${response.status}`);
      const bytes = await response.arrayBuffer();
      // Offline: decoding needs no permission to make a sound.
      return await new OfflineAudioContext(1, 1, 44100).decodeAudioData(bytes);
    })();
    decoded.set(url, found);
    if (decoded.size > 8) decoded.delete(decoded.keys().next().value!);
  }
  return found;
}

/** In place, real and imaginary parts; the size is a power of two. */
export function fft(re: Float32Array, im: Float32Array): void {
  const n = re.length;
  for (let i = 1, j = 0; i < n; i += 1) {
    let bit = n >> 1;
    for (; (j & bit) !== 0; bit >>= 1) j ^= bit;
    j ^= bit;
    if (i < j) {
      [re[i], re[j]] = [re[j]!, re[i]!];
      [im[i], im[j]] = [im[j]!, im[i]!];
    }
  }
  for (let size = 2; size <= n; size *= 2) {
    const half = size / 2, angle = (-2 * Math.PI) / size;
    for (let k = 0; k < half; k += 1) {
      const c = Math.cos(angle * k), d = Math.sin(angle * k);
      for (let i = k; i < n; i += size) {
        const j = i + half;
        const x = re[j]! * c - im[j]! * d, y = re[j]! * d + im[j]! * c;
        re[j] = re[i]! - x;
        im[j] = im[i]! - y;
        re[i] = re[i]! + x;
        im[i] = im[i]! + y;
      }
    }
  }
}

const SIZE = 1024;

/** Energy over time and pitch, mel-spaced from 40 Hz up, 70 dB of it, drawn to fill the canvas. */
export function spectrogram(buffer: AudioBuffer, canvas: HTMLCanvasElement): void {
  const samples = buffer.getChannelData(0), rate = buffer.sampleRate;
  const width = Math.min(900, Math.max(1, Math.floor(samples.length / 128))), height = 96;
  const mel = (hz: number): number => 2595 * Math.log10(1 + hz / 700), hz = (m: number): number => 700 * (10 ** (m / 2595) - 1);
  const low = mel(40), high = mel(Math.min(rate / 2, 11000));
  const bins = Array.from({ length: height + 1 }, (_, i) => (hz(low + ((high - low) * i) / height) * SIZE) / rate);
  const shape = Float32Array.from({ length: SIZE }, (_, i) => 0.5 - 0.5 * Math.cos((2 * Math.PI * i) / SIZE));
  const decibels = new Float32Array(width * height);
  const re = new Float32Array(SIZE), im = new Float32Array(SIZE);
  let top = -Infinity;
  for (let x = 0; x < width; x += 1) {
    const middle = Math.floor(((x + 0.5) / width) * samples.length) - SIZE / 2;
    im.fill(0);
    for (let i = 0; i < SIZE; i += 1) re[i] = (samples[middle + i] ?? 0) * shape[i]!;
    fft(re, im);
    for (let y = 0; y < height; y += 1) {
      const from = Math.floor(bins[y]!), to = Math.max(from + 1, Math.ceil(bins[y + 1]!));
      let most = 0;
      for (let k = from; k < to && k < SIZE / 2; k += 1) most = Math.max(most, re[k]! ** 2 + im[k]! ** 2);
      const db = 10 * Math.log10(most + 1e-12);
      decibels[y * width + x] = db;
      top = Math.max(top, db);
    }
  }
  const picture = new ImageData(width, height);
  for (let y = 0; y < height; y += 1) for (let x = 0; x < width; x += 1) {
    const share = (decibels[y * width + x]! - top + 70) / 70;
    picture.data.set([...colour(share), 255], 4 * ((height - 1 - y) * width + x));
  }
  canvas.width = width;
  canvas.height = height;
  canvas.getContext("2d")!.putImageData(picture, 0, 0);
}

export function wave(buffer: AudioBuffer, canvas: HTMLCanvasElement): void {
  const samples = buffer.getChannelData(0), width = 900, height = 48;
  canvas.width = width;
  canvas.height = height;
  const ctx = canvas.getContext("2d")!;
  ctx.fillStyle = isDark() ? "#8b95a3" : "#5d6672";
  for (let x = 0; x < width; x += 1) {
    let least = 0, most = 0;
    for (let i = Math.floor((x / width) * samples.length); i < ((x + 1) / width) * samples.length; i += 1) {
      least = Math.min(least, samples[i]!);
      most = Math.max(most, samples[i]!);
    }
    ctx.fillRect(x, height / 2 - (most * height) / 2, 1, Math.max(1, ((most - least) * height) / 2));
  }
}

export type Note = [number, number, number, number];
export interface Track {
  seconds: number;
  buffer?: AudioBuffer;
  notes?: Note[];
}

/** Plays one track at a time; another takes over at the same moment, for comparing by ear. */
export class Player {
  private source: AudioBufferSourceNode | null = null;
  private voices: OscillatorNode[] = [];
  private gain: GainNode | null = null;
  private began = 0; // on the context's clock
  private from = 0;
  private frame = 0;
  private next = 0; // of the notes that are not scheduled yet
  track: Track | null = null;
  isPlaying = false;

  constructor(private readonly moved: () => void) {}

  get position(): number {
    const end = this.track?.seconds ?? 0;
    return this.isPlaying ? Math.min(end, this.from + audio().currentTime - this.began) : this.from;
  }

  /** Takes another track at the moment that was reached. */
  take(track: Track): void {
    const was = this.isPlaying, at = Math.min(this.position, Math.max(0, track.seconds - 0.02));
    this.silence();
    this.track = track;
    this.from = at;
    if (was) this.play();
    else this.moved();
  }

  seek(seconds: number): void {
    const was = this.isPlaying;
    this.silence();
    this.from = Math.max(0, Math.min(seconds, this.track?.seconds ?? 0));
    if (was) this.play();
    else this.moved();
  }

  toggle(): void {
    if (this.isPlaying) {
      this.from = this.position;
      this.silence();
      this.moved();
    } else this.play();
  }

  play(): void {
    const { track } = this;
    if (track === null) return;
    const sound = audio();
    void sound.resume();
    if (this.from >= track.seconds - 0.03) this.from = 0;
    this.gain = sound.createGain();
    this.gain.connect(sound.destination);
    this.began = sound.currentTime + 0.02;
    this.isPlaying = true;
    if (track.buffer !== undefined) {
      this.source = sound.createBufferSource();
      this.source.buffer = track.buffer;
      this.source.connect(this.gain);
      this.source.start(this.began, this.from);
    } else {
      this.gain.gain.value = 0.25;
      this.next = (track.notes ?? []).findIndex(([, end]) => end > this.from);
      if (this.next < 0) this.next = track.notes?.length ?? 0;
    }
    this.tick();
  }

  private tick(): void {
    if (!this.isPlaying) return;
    const { track } = this;
    if (track?.notes !== undefined && track.buffer === undefined) this.schedule(track.notes);
    if (track !== null && this.position >= track.seconds) {
      this.silence();
      this.from = 0;
    } else this.frame = requestAnimationFrame(() => this.tick());
    this.moved();
  }

  /** Notes of the next second: a triangle with a struck string's fall for each. */
  private schedule(notes: Note[]): void {
    const sound = audio(), until = this.position + 1;
    for (; this.next < notes.length && notes[this.next]![0] < until; this.next += 1) {
      const [start, end, key, velocity] = notes[this.next]!;
      if (end <= this.position) continue;
      const at = Math.max(sound.currentTime, this.began + start - this.from), stop = this.began + end - this.from;
      const voice = sound.createOscillator(), shape = sound.createGain();
      voice.type = "triangle";
      voice.frequency.value = 440 * 2 ** ((key - 69) / 12);
      const loud = 0.12 + 0.6 * (velocity / 127) ** 1.5;
      shape.gain.setValueAtTime(0, at);
      shape.gain.linearRampToValueAtTime(loud, at + 0.006);
      shape.gain.exponentialRampToValueAtTime(loud * 0.12, Math.max(at + 0.02, Math.min(stop, at + 2.5)));
      shape.gain.linearRampToValueAtTime(0, Math.max(at + 0.03, stop) + 0.09);
      voice.connect(shape).connect(this.gain!);
      voice.start(at);
      voice.stop(Math.max(at + 0.03, stop) + 0.1);
      this.voices.push(voice);
    }
    if (this.voices.length > 256) this.voices.splice(0, 128);
  }

  silence(): void {
    cancelAnimationFrame(this.frame);
    this.isPlaying = false;
    try {
      this.source?.stop();
      for (const voice of this.voices) voice.stop();
    } catch {
      // it had ended
    }
    this.gain?.disconnect();
    this.source = this.gain = null;
    this.voices = [];
  }
}
