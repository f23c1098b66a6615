// What the doctor says of a run, on the curve where it began; what nobody looked at; layers; the step's time; captures.

import { ask, type Answer, curve, Refusal, type Row } from "./api";
import { Chart, type Mark } from "./chart";
import { looks } from "./colours";
import { copyable, empty, h, put } from "./dom";
import { duration, num, short, value } from "./format";
import { heat } from "./heat";
import { section } from "./run";
import { status } from "./runs";
import { choose, chosen, link, type Page } from "./state";

interface Finding {
  rule: string;
  severity: string;
  what: string;
  since: number | null;
  evidence: string[];
  ruled_out: string[];
  probe: string;
  remedy: string;
  title: string;
  command: string;
}

export async function healthPage(asked: string, query: URLSearchParams): Promise<Page> {
  const { runs } = await ask<{ runs: Row[] }>("runs");
  if (runs.length === 0) return { title: "Health", root: empty("No run to look at yet", "The doctor reads what a run recorded; train one first.", "rung train piano") };
  const newest = [...runs].sort((a, b) => String(b.started).localeCompare(String(a.started)))[0]!;
  const run = asked || chosen[0] || newest.run;
  const charts: Chart[] = [];
  const stops: (() => void)[] = [];
  const choice = h("select", { "aria-label": "Run", onchange: () => (choose([choice.value, ...chosen.filter((one) => one !== choice.value)]), (location.hash = `#/health/${choice.value}`)) }, ...runs.map((row) => h("option", { value: row.run }, `${row.run}  ${row.status}`)));
  choice.value = run;
  const body = h("div", { class: "health-body" }, h("p", { class: "quiet", role: "status" }, "Looking at the record …"));
  const root = h("section", { class: "health", "aria-label": `Health of ${run}` },
    h("div", { class: "toolbar" }, h("label", {}, "Run ", choice), h("span", { class: "space" }), h("a", { class: "button", href: `#/run/${run}` }, "The run"), h("a", { class: "button", href: link("curves", { runs: run, findings: 1 }) }, "Findings on its curves")), body);
  void fill(body, run, query, charts, stops);
  return { title: `Health of ${run}`, root, close: () => (charts.forEach((chart) => chart.destroy()), stops.forEach((stop) => stop())) };
}

async function fill(body: HTMLElement, run: string, query: URLSearchParams, charts: Chart[], stops: (() => void)[]): Promise<void> {
  let said: Answer;
  try {
    said = await ask<Answer>(`doctor/${run}`);
  } catch (problem) {
    put(body, empty("The doctor cannot look at this run", problem instanceof Refusal ? problem.message : "The server does not answer.", `rung doctor ${run}`));
    return;
  }
  const findings = (said["findings"] ?? []) as Finding[];
  const answers = (said["answers"] ?? {}) as Record<string, Record<string, string>>;
  const counts = ["sick", "healthy", "not_looked_at"].map((name) => `${Object.keys(answers[name] ?? {}).length} ${name.replaceAll("_", " ")}`).join(", ");
  const unknown = (said["unknown"] ?? []) as string[];
  const verdict = String(said["verdict"]);
  const curveBox = h("section", { class: findings.length > 0 ? "panel" : "panel two-columns", "aria-label": "Where findings began" });
  const layersBox = h("div"), clockBox = h("div");
  const preflight = (said["preflight"] ?? []) as Answer[], coincidences = (said["coincidences"] ?? []) as Answer[];
  put(body,
    h("p", { class: "sentence", "data-verdict": verdict }, h("span", { class: "kind" }, verdict), " ", status(String(said["status"])), ` after ${short(said["steps"], 8)} steps. `, h("span", { class: "quiet" }, `Of ${((said["rules"] ?? []) as unknown[]).length} rules: ${counts}.`), unknown.length > 0 && h("span", { class: "quiet" }, ` Not known: ${unknown.join("; ")}.`)),
    findings.length > 0
      ? h("div", { class: "two-columns" }, h("div", { class: "findings" }, findings.map((one) => show(one, run))), curveBox)
      : [h("p", { class: "quiet" }, verdict === "healthy" ? "No rule that could look found anything." : "No finding; see below what was not looked at."), curveBox],
    coincidences.length > 0 && section("What changed, and what happened near it", `${coincidences.length}`, h("table", {}, h("tbody", {}, ...coincidences.map((one) => h("tr", {}, h("td", { class: "number" }, `step ${short(one["step"], 8)}`), h("td", {}, String(one["signal"])), h("td", { class: "number" }, `${short(one["before"])} → ${short(one["after"])}`), h("td", { class: "wrap quiet" }, ((one["events"] ?? []) as string[]).join(", ") || "nothing that was recorded"))))), true),
    preflight.length > 0 && section("Checks before step 0", `${preflight.length}`, h("ul", { class: "plain-list" }, ...preflight.map((one) => h("li", {}, h("b", {}, `${value(one["level"])} ${value(one["name"])}: `), value(one["seen"]), one["remedy"] ? h("span", { class: "quiet" }, ` ${value(one["remedy"])}`) : ""))), true),
    captures(said), clockBox, layersBox, notLooked(said));
  void evidence(curveBox, run, findings, charts, stops);
  void clock(clockBox, run);
  void layers(layersBox, run, query.get("layers") ?? "");
}

function show(one: Finding, run: string): HTMLElement {
  const list = (name: string, texts: string[]): (HTMLElement | false)[] => (texts.length === 0 ? [] : [h("dt", {}, name), h("dd", {}, ...texts.map((text) => h("div", {}, text)))]);
  return h("article", { class: "finding", "data-severity": one.severity, "data-rule": one.rule },
    h("h3", {}, h("span", { class: "kind" }, `${one.rule} ${one.severity}`), " ", one.title), h("p", {}, one.what, one.since !== null && " ", one.since !== null && h("a", { href: link("curves", { runs: run, at: one.since, findings: 1 }) }, `Since step ${short(one.since, 8)}.`)),
    h("dl", { class: "facts" }, ...list("evidence", one.evidence), ...list("ruled out", one.ruled_out), ...list("confirm", one.probe === "" ? [] : [one.probe]), ...list("try", one.remedy === "" ? [] : [one.remedy])),
    one.command !== "" && copyable(one.command));
}

async function evidence(box: HTMLElement, run: string, findings: Finding[], charts: Chart[], stops: (() => void)[]): Promise<void> {
  const marks: Mark[] = findings.filter((one) => one.since !== null).map((one) => ({ x: one.since!, label: one.rule, level: one.severity }));
  for (const metric of ["loss", "norm"]) {
    const chart = new Chart({ height: 190, sync: `health ${run}`, onPick: (x) => (location.hash = link("curves", { runs: run, at: Math.round(x), findings: 1 })) });
    charts.push(chart);
    try {
      const { series } = await curve({ runs: run, metric, x: "step", points: 800, smooth: 0.6 });
      if (series.length === 0) {
        chart.destroy();
        continue;
      }
      box.append(h("div", {}, h("h3", {}, metric), chart.root));
      const draw = (): void => chart.show({ metric, x: "step", marks, lines: series.map((one) => ({ ...one, look: looks([run]).get(run)!, label: run })) });
      draw();
      addEventListener("rung-theme", draw);
      stops.push(() => removeEventListener("rung-theme", draw));
    } catch {
      chart.destroy();
    }
  }
  if (box.children.length === 0) box.append(h("p", { class: "quiet" }, "Neither the loss nor the norm was recorded."));
}

function notLooked(said: Answer): HTMLElement | false {
  const answers = ((said["answers"] ?? {}) as Record<string, Record<string, string>>)["not_looked_at"] ?? {};
  const how = (said["how"] ?? {}) as Record<string, string>;
  const rules = Object.keys(answers);
  if (rules.length === 0) return false;
  return section("Not looked at", `${rules.length} rules`, h("div", { class: "scroll", tabindex: 0 }, h("table", {}, h("thead", {}, h("tr", {}, h("th", {}, "rule"), h("th", {}, "why not"), h("th", {}, "what would let the doctor look"))),
    h("tbody", {}, ...rules.map((rule) => h("tr", {}, h("th", { scope: "row" }, rule), h("td", { class: "wrap" }, answers[rule] ?? ""), h("td", { class: "wrap" }, how[rule] ? h("code", {}, how[rule]!) : "")))))), true);
}

/** Where the time of a step goes, and how much faster the run would be without each wait. */
async function clock(box: HTMLElement, run: string): Promise<void> {
  let said: Answer;
  try {
    said = await ask<Answer>(`clock/${run}`);
  } catch {
    return; // a run without rows has no clock
  }
  const parts = (said["parts"] ?? []) as Answer[];
  const ofStep = parts.filter((one) => one["is_of_step"] !== false && num(one["mean_ms"]) > 0);
  if (ofStep.length === 0) {
    put(box, section("Step clock", "not recorded", h("p", { class: "quiet" }, "rung's own loops record the parts of a step; in a loop of one's own ", h("code", {}, "run.watch"), " does."), false));
    return;
  }
  const gains = new Map(((said["gains"] ?? []) as Answer[]).map((one) => [String(one["name"]), num(one["speedup"])]));
  const keys = new Map(ofStep.map((one, i) => [String(one["name"]), i % 6]));
  const title = (one: Answer): string => String(one["name"]).replaceAll("_", " ");
  const bar = h("div", { class: "clock", role: "img", "aria-label": ofStep.map((one) => `${title(one)} ${short(one["mean_ms"], 3)} ms`).join(", ") }, ...ofStep.map((one) => {
    const piece = h("span", { "data-i": keys.get(String(one["name"])), title: `${title(one)} ${short(one["mean_ms"], 3)} ms` }, num(one["share"]) > 0.12 ? title(one) : "");
    piece.style.flexGrow = String(num(one["share"]));
    return piece;
  }));
  const shown = parts.filter((one) => num(one["mean_ms"]) > 0);
  put(box, section("Step clock", `${duration(num(said["step_ms"]) / 1000)} a step, over ${short(said["num_steps"], 8)} steps`, h("div", {}, bar, h("div", { class: "scroll", tabindex: 0 }, h("table", {}, h("thead", {}, h("tr", {}, h("th", {}, "part"), h("th", { class: "number" }, "mean"), h("th", { class: "number" }, "5 % to 95 %"), h("th", { class: "number" }, "of a step"), h("th", {}, "the run without it"))),
    h("tbody", {}, ...shown.map((one) => h("tr", { "data-part": String(one["name"]) }, h("th", { scope: "row" }, h("span", { class: "clock-key", "data-i": keys.get(String(one["name"])) ?? null }), title(one), one["is_of_step"] === false && h("span", { class: "quiet" }, keys.has(String(one["name"])) ? "" : " (beside)")), h("td", { class: "number" }, `${short(one["mean_ms"], 3)} ms`), h("td", { class: "number quiet" }, `${short(one["p5_ms"], 3)} – ${short(one["p95_ms"], 3)}`), h("td", { class: "number" }, `${(100 * num(one["share"])).toFixed(1)} %`),
      h("td", { class: "quiet" }, gains.has(String(one["name"])) ? `${gains.get(String(one["name"]))!.toFixed(2)}× as fast` : "")))))),
  ), true));
}

async function layers(box: HTMLElement, run: string, kind: string, metric = ""): Promise<void> {
  let said: Answer;
  try {
    said = await ask<Answer>(`layers/${run}`, { kind, metric });
  } catch (problem) {
    if (problem instanceof Refusal) put(box, section("Layers over the steps", "", h("p", { class: "quiet" }, problem.message), false));
    return;
  }
  const kinds = (said["kinds"] ?? {}) as Record<string, string[]>, steps = (said["steps"] ?? []) as number[], of = (said["layers"] ?? []) as string[];
  if (steps.length === 0 || of.length === 0) {
    put(box, section("Layers over the steps", "not recorded", h("p", { class: "quiet" }, "Norms of each layer come with their tables; ", h("code", {}, "signals.activation_stats_every=100"), " records activations as well."), false));
    return;
  }
  const values = (said["values"] ?? []) as unknown[][];
  const positive = values.flat().map(num).filter((x) => Number.isFinite(x) && x !== 0).sort((a, b) => a - b);
  const isLog = positive.length > 0 && positive[0]! > 0 && positive.at(-1)! > 30 * positive[Math.floor(positive.length * 0.05)]!;
  const choice = h("select", { "aria-label": "Number per layer", onchange: () => {
    const [to, name] = choice.value.split(" ");
    void layers(box, run, to ?? "", name);
  } }, ...Object.entries(kinds).flatMap(([to, names]) => names.map((name) => h("option", { value: `${to} ${name}` }, Object.keys(kinds).length > 1 ? `${to}: ${name}` : name))));
  choice.value = `${said["kind"]} ${said["metric"]}`;
  put(box, section("Layers over the steps", `${of.length} layers, ${steps.length} steps`, h("div", {}, h("label", { class: "row" }, "Show ", choice), heat(steps, of, values, isLog)), true));
}

/** Steps that were kept because they went wrong, and what replaying them said. */
function captures(said: Answer): HTMLElement | false {
  const found = (said["captures"] ?? []) as Answer[], replays = (said["replays"] ?? []) as Answer[];
  if (found.length === 0 && replays.length === 0) return false;
  const words = (one: Answer): HTMLElement => h("pre", { class: "text", tabindex: 0 }, String(one["text"] ?? ""));
  return section("Captures and replays", `${found.length}`, h("table", {}, h("tbody", {}, ...found.map((one) => {
    const of = replays.filter((replay) => replay["step"] === one["step"]);
    return h("tr", {}, h("td", { class: "number" }, `step ${short(one["step"], 8)}`), h("td", { class: "wrap" }, of.length > 0 ? of.map(words) : h("span", { class: "quiet" }, "not replayed yet")), h("td", {}, copyable(String(one["command"]))));
  }), ...replays.filter((replay) => !found.some((one) => one["step"] === replay["step"])).map((one) => h("tr", {}, h("td", { class: "number" }, `step ${short(one["step"], 8)}`), h("td", { class: "wrap" }, words(one)), h("td", {}))))), true);
}
