// What changes while one looks: the server sends new rows and statuses; here they are handed to the page that is open.

import { type Answer, address, isExport } from "./api";

interface Listener {
  rows?: (run: string, rows: Answer[]) => void;
  runs?: (rows: Answer[]) => void;
}

let source: EventSource | null = null;

export function follow(runs: readonly string[], listener: Listener): () => void {
  if (isExport) return () => undefined;
  source?.close();
  const opened = new EventSource(address("live", { runs: runs.join(",") }));
  source = opened;
  opened.addEventListener("rows", (event) => {
    const said = parse(event as MessageEvent<string>);
    const rows = (Array.isArray(said["rows"]) ? said["rows"] : []) as Answer[];
    if (typeof said["run"] === "string") listener.rows?.(said["run"], rows);
  });
  opened.addEventListener("runs", (event) => {
    const said = parse(event as MessageEvent<string>) as unknown;
    const rows = Array.isArray(said) ? said : Array.isArray((said as Answer)["runs"]) ? ((said as Answer)["runs"] as Answer[]) : [said];
    listener.runs?.(rows as Answer[]);
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
