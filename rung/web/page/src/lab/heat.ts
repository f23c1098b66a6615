// Numbers per layer over the steps, as a picture: a column is a step, a row is a layer.

import { h } from "./dom";
import { num, short } from "./format";

// Dark to light in one direction of lightness, so that it also reads without colours; stops in sRGB.
const STOPS: [number, number, number][] = [[24, 20, 60], [60, 36, 122], [30, 98, 150], [24, 148, 130], [120, 190, 86], [246, 222, 90]];

export function heat(steps: number[], layers: string[], values: unknown[][], isLog: boolean): HTMLElement {
  // values[step][layer] or [layer][step]; by their sizes.
  const isByStep = values.length === steps.length && (values[0]?.length ?? 0) === layers.length;
  const at = (layer: number, step: number): number => num((isByStep ? values[step]?.[layer] : values[layer]?.[step]) ?? NaN);
  const scale = (x: number): number => (isLog ? (x > 0 ? Math.log10(x) : NaN) : x);
  const finite: number[] = [];
  for (let i = 0; i < layers.length; i += 1) for (let j = 0; j < steps.length; j += 1) {
    const x = scale(at(i, j));
    if (Number.isFinite(x)) finite.push(x);
  }
  finite.sort((a, b) => a - b);
  const low = finite[Math.floor(0.01 * (finite.length - 1))] ?? 0, high = finite[Math.ceil(0.99 * (finite.length - 1))] ?? 1;
  const picture = new ImageData(Math.max(1, steps.length), Math.max(1, layers.length));
  for (let i = 0; i < layers.length; i += 1) for (let j = 0; j < steps.length; j += 1) {
    const raw = at(i, j), x = scale(raw), to = 4 * (i * steps.length + j);
    const isBad = !Number.isFinite(raw);
    const [r, g, b] = isBad ? [214, 40, 40] : colour(Number.isFinite(x) ? (x - low) / (high - low || 1) : 0);
    picture.data.set([r, g, b, 255], to);
  }
  const canvas = h("canvas", { width: picture.width, height: picture.height, class: "heat", role: "img", tabindex: 0, "aria-label": `${layers.length} layers over ${steps.length} steps, from ${short(isLog ? 10 ** low : low)} to ${short(isLog ? 10 ** high : high)}` });
  canvas.getContext("2d")!.putImageData(picture, 0, 0);
  const row = Math.max(10, Math.min(18, Math.floor(420 / Math.max(1, layers.length))));
  canvas.style.height = `${row * layers.length}px`;
  const readout = h("p", { class: "quiet number heat-at", role: "status" }, "Point at the picture to read a value.");
  let place: [number, number] = [0, 0];
  const tell = (): void => {
    const [j, i] = place;
    readout.textContent = `step ${short(steps[j], 8)}   ${layers[i]}   ${short(at(i, j), 5)}`;
  };
  canvas.addEventListener("pointermove", (event) => {
    const box = canvas.getBoundingClientRect();
    place = [clamp(Math.floor(((event.clientX - box.left) / box.width) * steps.length), steps.length), clamp(Math.floor(((event.clientY - box.top) / box.height) * layers.length), layers.length)];
    tell();
  });
  canvas.addEventListener("keydown", (event) => {
    const by: Record<string, [number, number]> = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
    const move = by[event.key];
    if (move === undefined) return;
    place = [clamp(place[0] + move[0], steps.length), clamp(place[1] + move[1], layers.length)];
    event.preventDefault();
    event.stopPropagation();
    tell();
  });
  const names = h("ol", { class: "heat-names" }, ...layers.map((name, i) => {
    const item = h("li", { title: name }, layers.length > 42 && i % Math.ceil(layers.length / 42) !== 0 ? "" : name);
    item.style.height = `${row}px`;
    item.style.lineHeight = `${row}px`;
    return item;
  }));
  const bar = h("canvas", { width: 128, height: 1, class: "heat-bar", "aria-hidden": "true" });
  const ramp = new ImageData(128, 1);
  for (let i = 0; i < 128; i += 1) ramp.data.set([...colour(i / 127), 255], 4 * i);
  bar.getContext("2d")!.putImageData(ramp, 0, 0);
  return h("div", { class: "heat-map" }, names, h("div", { class: "heat-box" }, canvas, h("div", { class: "row heat-foot number" }, h("span", {}, `step ${short(steps[0], 8)}`), h("span", { class: "space" }), h("span", {}, `step ${short(steps.at(-1), 8)}`))),
    h("div", { class: "heat-scale" }, readout, h("span", { class: "row number" }, short(isLog ? 10 ** low : low, 3), bar, short(isLog ? 10 ** high : high, 3), isLog ? "log" : "")));
}

function clamp(i: number, size: number): number {
  return Math.max(0, Math.min(size - 1, i));
}

export function colour(share: number): [number, number, number] {
  const x = Math.max(0, Math.min(1, share)) * (STOPS.length - 1), i = Math.min(STOPS.length - 2, Math.floor(x)), t = x - i;
  const [a, b] = [STOPS[i]!, STOPS[i + 1]!];
  return [0, 1, 2].map((k) => Math.round(a[k]! + t * (b[k]! - a[k]!))) as [number, number, number];
}
