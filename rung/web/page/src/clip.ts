// Takes the canvas home: a still, or a clip of what is shown while it records.

const KINDS = ["video/webm;codecs=vp9", "video/webm;codecs=vp8", "video/webm", "video/mp4"];
const BITS_PER_SECOND = 8_000_000; // hard edges of enlarged pixels need more than film does

export class Clip {
  private recorder: MediaRecorder | null = null;

  constructor(private readonly canvas: HTMLCanvasElement) {}

  get isOn(): boolean {
    return this.recorder !== null;
  }

  start(name: () => string): void {
    const kind = KINDS.find((each) => MediaRecorder.isTypeSupported(each));
    const recorder = new MediaRecorder(this.canvas.captureStream(), {
      videoBitsPerSecond: BITS_PER_SECOND,
      ...(kind === undefined ? {} : { mimeType: kind }),
    });
    const parts: Blob[] = [];
    recorder.ondataavailable = (event) => parts.push(event.data);
    recorder.onstop = () => {
      const type = recorder.mimeType;
      save(new Blob(parts, { type }), `${name()}.${type.startsWith("video/mp4") ? "mp4" : "webm"}`);
    };
    recorder.start(1000); // in parts of a second, so that a long clip is not held twice
    this.recorder = recorder;
  }

  stop(): void {
    this.recorder?.stop();
    for (const track of this.recorder?.stream.getTracks() ?? []) track.stop();
    this.recorder = null;
  }
}

export function saveStill(canvas: HTMLCanvasElement, name: string): void {
  canvas.toBlob((blob) => blob !== null && save(blob, `${name}.png`), "image/png");
}

function save(blob: Blob, name: string): void {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(blob);
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 60_000);
}
