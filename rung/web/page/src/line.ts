// The line to the server: asks for views, takes them apart, and comes back by itself when it was cut.

export interface Channel {
  name: string;
  low: number;
  high: number;
  is_constant: boolean;
}

export interface About {
  height: number;
  width: number;
  rate_hz: number;
  controls: Channel[];
  intents: string[];
  places: { label: string; length: number }[];
  start?: { place: number; offset: number }; // where a visitor who asks for no place begins
}

export interface Hello {
  visit: string;
  is_known: boolean; // the walk of before was still there
  title: string;
  about: About;
}

export interface Wish {
  walk: number;
  place: number;
  offset: number;
  mode: "walk" | "follow";
  intent: Record<string, number>;
  coding: "auto" | "jpeg";
}

export interface Head {
  walk: number;
  step: number;
  place: number;
  offset: number;
  model_ms: number;
  wanted?: (number | null)[];
  given?: (number | null)[];
  clamped?: boolean[];
  coding?: string;
  pictures?: [string, number][];
  is_end?: boolean;
}

export type Pictures = Map<string, ImageData | ImageBitmap>;

export interface Listener {
  hello(hello: Hello): void;
  answer(head: Head, pictures: Pictures): void;
  error(text: string, isFatal: boolean): void;
  lost(): void;
}

const MOST_ASKED = 2; // one view under way while another is drawn; more would only make the keys late
const FIRST_WAIT_MS = 200;
const LONGEST_WAIT_MS = 4000;

export class Line {
  private socket: WebSocket | null = null;
  private visit = "";
  private wait = FIRST_WAIT_MS;
  private numAsked = 0;
  private isEnded = false;
  private about: About | null = null;

  constructor(private readonly listener: Listener) {
    addEventListener("online", () => this.connect());
  }

  connect(): void {
    if (this.isEnded || (this.socket !== null && this.socket.readyState <= WebSocket.OPEN)) return;
    const url = new URL("walk", location.href);
    url.protocol = location.protocol === "https:" ? "wss:" : "ws:";
    url.search = this.visit === "" ? "" : `?visit=${this.visit}`;
    url.hash = "";
    const socket = new WebSocket(url);
    socket.binaryType = "arraybuffer";
    let work = Promise.resolve(); // answers are shown in order, also when pictures take their time to decode
    socket.onmessage = (event: MessageEvent<string | ArrayBuffer>) => {
      work = work
        .then(() => this.take(socket, event.data))
        .catch((error: unknown) => {
          if (socket !== this.socket) return;
          this.numAsked = Math.max(0, this.numAsked - 1);
          this.listener.error(`an answer could not be shown: ${String(error)}`, false);
        });
    };
    socket.onclose = () => {
      if (this.socket !== socket) return;
      this.socket = null;
      if (this.isEnded) return;
      this.listener.lost();
      setTimeout(() => this.connect(), this.wait);
      this.wait = Math.min(2 * this.wait, LONGEST_WAIT_MS);
    };
    this.socket = socket;
    this.about = null;
    this.numAsked = 0;
  }

  /** Wishes that were sent and not answered yet. */
  get underWay(): number {
    return this.numAsked;
  }

  /** Sends a wish, unless enough is under way already. */
  ask(wish: () => Wish): boolean {
    const { socket } = this;
    if (this.about === null || socket?.readyState !== WebSocket.OPEN || this.numAsked >= MOST_ASKED) return false;
    socket.send(JSON.stringify(wish()));
    this.numAsked += 1;
    return true;
  }

  private async take(socket: WebSocket, data: string | ArrayBuffer): Promise<void> {
    if (typeof data !== "string") {
      const { head, pictures } = await unpack(data, this.about);
      if (socket !== this.socket) return;
      this.numAsked -= 1;
      this.listener.answer(head, pictures);
      return;
    }
    if (socket !== this.socket) return;
    const said = JSON.parse(data) as Hello | { error: string; is_fatal?: boolean };
    if ("error" in said) {
      this.numAsked -= 1;
      this.isEnded = said.is_fatal === true;
      this.listener.error(said.error, this.isEnded);
      return;
    }
    this.visit = said.visit;
    this.about = said.about;
    this.wait = FIRST_WAIT_MS;
    this.listener.hello(said);
  }
}

async function unpack(data: ArrayBuffer, about: About | null): Promise<{ head: Head; pictures: Pictures }> {
  const length = new DataView(data).getUint32(0, true);
  const head = JSON.parse(new TextDecoder().decode(new Uint8Array(data, 4, length))) as Head;
  const pictures: Pictures = new Map();
  let begin = 4 + length;
  for (const [name, size] of head.pictures ?? []) {
    const bytes = new Uint8Array(data, begin, size);
    begin += size;
    if (head.coding === "jpeg") pictures.set(name, await createImageBitmap(new Blob([bytes], { type: "image/jpeg" })));
    else if (about !== null) pictures.set(name, fromRgb(bytes, about.width, about.height));
  }
  return { head, pictures };
}

function fromRgb(bytes: Uint8Array, width: number, height: number): ImageData {
  const image = new ImageData(width, height);
  const { data } = image;
  for (let from = 0, to = 0; from < bytes.length; from += 3, to += 4) {
    data[to] = bytes[from]!;
    data[to + 1] = bytes[from + 1]!;
    data[to + 2] = bytes[from + 2]!;
    data[to + 3] = 255;
  }
  return image;
}
