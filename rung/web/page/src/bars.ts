// The controls as the model sees them: one bar per channel, within the range of the training data.

import type { Channel, Head } from "./line";

const MARGIN = 14; // per cent of a track on either side, for what lies outside the range

interface Row {
  channel: Channel;
  item: HTMLElement;
  given: HTMLElement;
  wanted: HTMLElement;
  value: HTMLElement;
  note: HTMLElement;
}

export class Bars {
  private rows: Row[] = [];

  constructor(
    private readonly list: HTMLElement,
    private readonly summary: HTMLElement,
  ) {}

  setUp(channels: readonly Channel[]): void {
    this.rows = channels.map((channel) => makeRow(channel));
    this.list.replaceChildren(...this.rows.map((row) => row.item));
  }

  show(head: Head): void {
    const clamped: string[] = [];
    this.rows.forEach((row, index) => {
      const wanted = head.wanted?.[index] ?? NaN;
      const given = head.given?.[index] ?? NaN;
      const isClamped = head.clamped?.[index] === true;
      if (isClamped) clamped.push(row.channel.name);
      showRow(row, wanted, given, isClamped);
    });
    const text = clamped.length === 0 ? "" : `Out of the training range, clamped: ${clamped.join(", ")}`;
    if (this.summary.textContent !== text) this.summary.textContent = text; // only then is it read out
  }
}

function showRow(row: Row, wanted: number, given: number, isClamped: boolean): void {
  const { channel } = row;
  row.item.dataset["state"] = isClamped ? "clamped" : channel.is_constant ? "constant" : "fine";
  row.value.textContent = short(given);
  row.note.textContent = isClamped ? `wanted ${short(wanted)}` : channel.is_constant ? "constant" : "";
  const begin = place(channel, origin(channel));
  const end = place(channel, given);
  row.given.style.left = `${Math.min(begin, end)}%`;
  row.given.style.width = `${Math.abs(end - begin)}%`;
  row.wanted.style.left = `${place(channel, wanted)}%`;
}

/** Where a bar begins: at zero, or at the end of the range that is nearest to it. */
function origin(channel: Channel): number {
  return Math.max(channel.low, Math.min(channel.high, 0));
}

/** Where a value lies on the track, in per cent of its length. */
function place(channel: Channel, value: number): number {
  const share = (value - channel.low) / (channel.high - channel.low);
  if (!Number.isFinite(share)) return 50;
  return Math.max(1, Math.min(99, MARGIN + (100 - 2 * MARGIN) * share));
}

function short(value: number): string {
  if (Number.isNaN(value)) return "none";
  const text = Math.abs(value) >= 100 ? value.toFixed(0) : value.toFixed(Math.abs(value) >= 10 ? 1 : 3);
  return Number(text) === 0 ? "0.000" : text; // not -0.000
}

function makeRow(channel: Channel): Row {
  const item = make("li", "channel");
  item.dataset["name"] = channel.name;
  item.title = `${short(channel.low)} to ${short(channel.high)} in the training data`;
  const name = make("span", "name");
  name.textContent = channel.name.replaceAll("_", " ");
  const track = make("span", "track");
  const range = make("span", "range");
  range.style.left = range.style.right = `${MARGIN}%`;
  const zero = make("span", "zero");
  zero.style.left = `${place(channel, origin(channel))}%`;
  const given = make("span", "given");
  const wanted = make("span", "wanted");
  track.append(range, given, zero, wanted);
  const value = make("output", "value");
  const note = make("span", "note");
  item.append(name, track, value, note);
  return { channel, item, given, wanted, value, note };
}

function make(tag: string, className: string): HTMLElement {
  const made = document.createElement(tag);
  made.className = className;
  return made;
}
