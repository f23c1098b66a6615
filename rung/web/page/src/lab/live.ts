// What changes while one looks: the server sends new rows and statuses; here they are handed to the page that is open.

import { type Answer, address, isExport } from "./api";

interface Listener {
  rows?: (run: string, rows: Answer[], isRestarted: boolean) => void;
  runs?: (rows: Answer[], gone: string[]) => void;
}

let source: EventSource | null = null;

/** New rows of `runs`, of these metrics alone where some are named, and any run that began, ended or was written to. */
export function follow(runs: readonly string[], listener: Listener, metrics: readonly string[] = []): () => void {
  if (isExport) return () => undefined;
  source?.close();
  const opened = new EventSource(address("live", { runs: runs.join(","), metrics: metrics.join(",") }));
  source = opened;
  opened.addEventListener("rows", (event) => {
    const said = parse(event as MessageEvent<string>);
    const rows = (Array.isArray(said["rows"]) ? said["rows"] : []) as Answer[];
    if (typeof said["run"] === "string") listener.rows?.(said["run"], rows, said["restarted"] === true);
  });
  opened.addEventListener("runs", (event) => {
    const said = parse(event as MessageEvent<string>);
    listener.runs?.((said["changed"] ?? []) as Answer[], (said["gone"] ?? []) as string[]);
  });
  const line = document.getElementById("line");
  const tell = (state: string, text: string): void => {
    if (line === null || source !== opened) return;
    line.dataset["state"] = state;
    line.textContent = text;
  };
  opened.onopen = () => tell("live", "Live");
  opened.onerror = () => tell("lost", opened.readyState === EventSource.CLOSED ? "Not live" : "Connection lost, trying again");
  return () => {
    opened.close();
    if (source === opened) {
      source = null;
      if (line !== null) (line.dataset["state"] = "quiet"), (line.textContent = "");
    }
  };
}

function parse(event: MessageEvent<string>): Answer {
  try {
    return JSON.parse(event.data) as Answer;
  } catch {
    return {};
  }
}
