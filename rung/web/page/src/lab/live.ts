// What changes while one looks: the server sends new rows and statuses; here they are handed to the page that is open.

import { type Answer, address, isExport } from "./api";

interface Listener {
  rows?: (run: string, rows: Answer[], isRestarted: boolean) => void;
  runs?: (rows: Answer[], gone: string[]) => void;
}

const states = new Map<EventSource, "" | "live" | "lost">(); // of the lines that are open

/** New rows of `runs`, of these metrics alone where some are named, and any run that began, ended or was written to. */
export function follow(runs: readonly string[], listener: Listener, metrics: readonly string[] = []): () => void {
  if (isExport) return () => undefined;
  const opened = new EventSource(address("live", { runs: runs.join(","), metrics: metrics.join(",") }));
  states.set(opened, "");
  opened.addEventListener("rows", (event) => {
    const said = parse(event as MessageEvent<string>);
    const rows = (Array.isArray(said["rows"]) ? said["rows"] : []) as Answer[];
    if (typeof said["run"] === "string") listener.rows?.(said["run"], rows, said["restarted"] === true);
  });
  opened.addEventListener("runs", (event) => {
    const said = parse(event as MessageEvent<string>);
    listener.runs?.((said["changed"] ?? []) as Answer[], (said["gone"] ?? []) as string[]);
  });
  opened.onopen = () => tell(opened, "live");
  opened.onerror = () => tell(opened, "lost");
  return () => {
    opened.close();
    states.delete(opened);
    tell();
  };
}

function tell(of?: EventSource, state: "live" | "lost" = "live"): void {
  if (of !== undefined && states.has(of)) states.set(of, state);
  const line = document.getElementById("line"), all = [...states.values()];
  const now = all.includes("lost") ? "lost" : all.includes("live") ? "live" : "quiet";
  if (line === null) return;
  line.dataset["state"] = now;
  line.textContent = now === "lost" ? "Connection lost, trying again" : now === "live" ? "Live" : "";
}

function parse(event: MessageEvent<string>): Answer {
  try {
    return JSON.parse(event.data) as Answer;
  } catch {
    return {};
  }
}
