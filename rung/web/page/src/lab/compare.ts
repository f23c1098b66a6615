// Two runs side by side: what differs, which of it one meant to change, and what came of it.

import { ask, type Answer, curve, isExport, Refusal, type Row } from "./api";
import { Chart, type Line } from "./chart";
import { looks } from "./colours";
import { copyable, empty, h, put, s } from "./dom";
import { isNumber, loss, num, short, signed, value } from "./format";
import { section } from "./run";
import { chosen, link, type Page } from "./state";

const WEIGHTS: Record<string, string> = { factor: "the change", hidden: "confounder", metric: "other metric", neutral: "no effect expected" };

export async function comparePage(query: URLSearchParams): Promise<Page> {
  const { runs } = await ask<{ runs: Row[] }>("runs");
  if (runs.length === 0) return { title: "Compare", root: empty("Nothing to compare yet", "Train a run, then one from it with a single change:", "rung train --parent piano/1 optimizer.grad_clip=0.5") };
  let a = query.get("a") ?? "", b = query.get("b") ?? "";
  if (a === "" && b === "") [a = "", b = ""] = chosen;
  if (b === "" || a === "") {
    const child = [...runs].reverse().find((row) => row.parent !== null && runs.some((one) => one.run === row.parent) && (a === "" || row.parent === a));
    [a, b] = child === undefined ? [a || runs[0]!.run, runs.find((row) => row.run !== (a || runs[0]!.run))?.run ?? ""] : [child.parent!, child.run];
  }
  const known = (row: Row): HTMLElement => h("option", { value: row.run }, row.why ?? "");
  const list = h("datalist", { id: "all-runs" }, ...runs.map(known));
  const field = (name: "a" | "b", run: string): HTMLInputElement => h("input", { list: "all-runs", value: run, "aria-label": `Run ${name.toUpperCase()}`, autocomplete: "off", spellcheck: "false", onchange: go });
  const from = field("a", a), to = field("b", b);
  function go(): void {
    location.hash = link("compare", { a: from.value.trim(), b: to.value.trim() });
  }
  const body = h("div", { class: "compared" });
  const charts: Chart[] = [];
  const root = h("section", { class: "compare", "aria-label": "Compare" },
    h("div", { class: "toolbar" }, h("label", {}, "A ", from), h("label", {}, "B ", to), h("button", { type: "button", title: "Swap A and B", "aria-label": "Swap A and B", onclick: () => (location.hash = link("compare", { a: b, b: a })) }, "⇄"), list,
      h("span", { class: "space" }), h("a", { class: "button", href: link("curves", { runs: `${a},${b}` }) }, "Curves of both"), h("a", { class: "button", href: link("samples", { runs: `${a},${b}` }) }, "Samples of both")), body);
  if (b === "" || a === b) put(body, empty("Two runs are needed", "Choose another run as B; the list knows them all.", `rung train --parent ${a}`));
  else void fill(body, a, b, charts);
  return { title: `${a} and ${b}`, root, close: () => charts.forEach((chart) => chart.destroy()), keys: [["S", "swap A and B"]], key: (event) => event.key.toLowerCase() === "s" && ((location.hash = link("compare", { a: b, b: a })), true) };
}

async function fill(body: HTMLElement, a: string, b: string, charts: Chart[]): Promise<void> {
  put(body, h("p", { class: "quiet", role: "status" }, "Comparing …"));
  let diff: Answer;
  try {
    diff = await ask<Answer>("diff", { a, b });
  } catch (problem) {
    put(body, empty("These two cannot be compared", problem instanceof Refusal ? problem.message : "The server does not answer.", "rung ls"));
    return;
  }
  const differences = (diff["differences"] ?? []) as Answer[];
  const confounders = new Set(((diff["confounders"] ?? []) as Answer[]).map((one) => JSON.stringify([one["part"], one["name"]])));
  const allowed = new Set(((diff["allowed"] ?? []) as Answer[]).map((one) => JSON.stringify([one["part"], one["name"]])));
  const isStrict = diff["is_strict"] === true;
  const table = (rows: Answer[]): HTMLElement => h("div", { class: "scroll", tabindex: 0 }, h("table", { class: "diff" },
    h("thead", {}, h("tr", {}, h("th", {}, "what"), h("th", {}, `A: ${a}`), h("th", {}, `B: ${b}`), h("th", {}, "it is"))),
    h("tbody", {}, ...rows.map((one) => {
      const key = JSON.stringify([one["part"], one["name"]]);
      const kind = confounders.has(key) ? "confounder" : allowed.has(key) ? "allowed" : WEIGHTS[String(one["weight"])] ?? String(one["weight"]);
      const isTree = [one["before"], one["after"]].some((x) => x !== null && typeof x === "object");
      const show = (side: "before" | "after"): string => (one[`source_${side}`] === "absent" ? "absent" : isTree ? "" : value(one[side] ?? ""));
      return h("tr", { "data-kind": kind }, h("th", { scope: "row" }, one["part"] !== "config" && h("span", { class: "quiet" }, `${one["part"]} `), String(one["name"])),
        h("td", {}, show("before"), one["source_before"] && one["source_before"] !== "absent" ? h("span", { class: "quiet source" }, String(one["source_before"])) : ""), h("td", {}, h("b", {}, show("after")), one["source_after"] && one["source_after"] !== "absent" ? h("span", { class: "quiet source" }, String(one["source_after"])) : ""),
        h("td", {}, h("span", { class: "kind" }, kind), one["detail"] ? h("span", { class: "quiet source wrap" }, String(one["detail"])) : ""));
    }))));
  const of = (...parts: string[]): Answer[] => differences.filter((one) => parts.includes(String(one["part"])));
  const code = (diff["code"] ?? {}) as Answer;
  const outcome = h("div", { class: "two-columns" });
  const rest = differences.filter((one) => !["config", "code"].includes(String(one["part"])));
  const same = (diff["same"] ?? []) as string[], unknown = (diff["not_looked_at"] ?? []) as string[], notes = (diff["notes"] ?? []) as string[];
  put(body,
    h("p", { class: "sentence", "data-strict": isStrict }, h("span", { class: "kind" }, isStrict ? "strict A/B" : "not a strict A/B"), " ", String(diff["words"] ?? "").replace(/^(not )?(a )?strict A\/B: ?/i, "").replaceAll(" -> ", " → ")),
    notes.length > 0 && h("ul", { class: "plain-list quiet" }, ...notes.map((note) => h("li", {}, note))),
    outcome,
    section("Settings", differences.length === 0 ? "nothing differs" : `${of("config").length} differ`, of("config").length > 0 ? table(of("config")) : h("p", { class: "quiet" }, "The config is the same."), true),
    section("Code", codeLine(code), patch(code), String(code["patch"] ?? "").length > 0),
    section("Data, environment, conditions", rest.length === 0 ? "nothing differs" : `${rest.length} differ`, rest.length > 0 ? table(rest) : h("p", { class: "quiet" }, "Nothing that was looked at differs."), rest.length > 0),
    same.length > 0 && section("The same in both", `${same.length}`, h("ul", { class: "plain-list" }, ...same.map((one) => h("li", {}, one))), false),
    unknown.length > 0 && section("Not looked at", `${unknown.length}`, h("ul", { class: "plain-list" }, ...unknown.map((one) => h("li", {}, one))), true));
  put(outcome, h("section", { class: "panel" }, h("h3", {}, "What came of it"), outcomes((diff["outcome"] ?? {}) as Answer, a, b)), overlay((diff["outcome"] ?? {}) as Answer, a, b, charts));
  const judge = h("section", { class: "panel" });
  outcome.after(judge);
  if (isExport) await judged(judge, [a], [b], diff);
  else await offer(judge, a, b, diff);
}

/** A verdict counts as a look at the two arms, so it is given when it is asked for. */
async function offer(box: HTMLElement, a: string, b: string, diff: Answer): Promise<void> {
  let arms: [string[], string[]] = [[a], [b]];
  try {
    // Runs that differ from these in their seed alone belong to the same arm.
    const { groups } = await ask<{ groups?: { runs: string[] }[] }>("runs", { group: 1, experiment: a.split("/")[0] });
    const of = (run: string): string[] => groups?.find((group) => group.runs.includes(run))?.runs ?? [run];
    if (!of(a).includes(b)) arms = [of(a), of(b)];
  } catch {
    // only these two, then
  }
  put(box, h("h3", {}, "Verdict over seeds"),
    h("p", { class: "quiet" }, `A: ${arms[0].join(", ")}. B: ${arms[1].join(", ")}. Every verdict counts as a look at these arms, and later ones must be more certain.`),
    h("p", { class: "row" }, h("button", { type: "button", id: "judge", onclick: () => void judged(box, arms[0], arms[1], diff) }, "Judge")));
}

async function judged(box: HTMLElement, a: string[], b: string[], diff: Answer): Promise<void> {
  try {
    box.replaceWith(judgement(await ask<Answer>("ab", { a: a.join(","), b: b.join(",") }), a, b));
  } catch (problem) {
    put(box, h("h3", {}, "Verdict over seeds"), h("p", { class: "quiet" }, problem instanceof Refusal ? problem.message : "It is not known."), copyable(`rung ab ${a[0]} ${changeOf(diff)} --seeds 3`));
  }
}

function changeOf(diff: Answer): string {
  const factor = diff["factor"] as Answer | null;
  return factor !== null && factor?.["part"] === "config" ? `${String(factor["name"])}=${value(factor["after"])}` : "KEY=VALUE";
}

function outcomes(outcome: Answer, a: string, b: string): HTMLElement {
  const sides = [outcome["a"], outcome["b"]] as (Answer | null)[];
  const point = (side: Answer | null, name: string): unknown => (side?.[name] as Answer | null | undefined)?.["value"];
  const rows: [string, unknown, unknown, (x: unknown) => string][] = [
    ["best", point(sides[0]!, "best"), point(sides[1]!, "best"), loss], ["last", point(sides[0]!, "final"), point(sides[1]!, "final"), loss],
    ["targets", sides[0]?.["targets"], sides[1]?.["targets"], short], ["targets/s", sides[0]?.["targets_per_s"], sides[1]?.["targets_per_s"], short], ["steps/s", sides[0]?.["steps_per_s"], sides[1]?.["steps_per_s"], short],
  ];
  const shown = rows.filter(([, x, y]) => isNumber(x) || isNumber(y));
  const problems = (outcome["problems"] ?? []) as string[];
  return h("div", {}, outcome["metric"] ? h("p", { class: "quiet" }, `${String(outcome["metric"])}, ${outcome["is_lower_better"] === false ? "higher" : "lower"} is better`) : "",
    shown.length > 0 && h("table", {}, h("thead", {}, h("tr", {}, h("th", {}, ""), h("th", { class: "number" }, a), h("th", { class: "number" }, b), h("th", { class: "number" }, "B − A"))),
      h("tbody", {}, ...shown.map(([name, x, y, as]) => h("tr", {}, h("th", { scope: "row" }, name), h("td", { class: "number" }, as(x)), h("td", { class: "number" }, as(y)), h("td", { class: "number" }, isNumber(x) && isNumber(y) ? signed(num(y) - num(x)) : ""))))),
    ...problems.map((one) => h("p", { class: "quiet" }, one)));
}

function overlay(outcome: Answer, a: string, b: string, charts: Chart[]): HTMLElement {
  const metric = String(outcome["metric"] ?? "loss");
  const chart = new Chart({ height: 240 });
  charts.push(chart);
  const found = looks([a, b]);
  const note = h("p", { class: "note quiet" });
  const show = async (name: string): Promise<boolean> => {
    const answer = await curve({ runs: `${a},${b}`, metric: name, x: "step", points: 600, smooth: 0 });
    const lines = answer.series.map((one): Line => ({ ...one, look: found.get(one.run) ?? [...found.values()][0]!, label: one.run }));
    if (lines.length > 0) chart.show({ metric: name, x: "step", lines });
    return lines.length > 0;
  };
  const title = h("h3", {}, metric);
  void (async () => {
    for (const name of [`eval/${metric}`, metric, "loss"]) {
      try {
        if (await show(name)) {
          title.textContent = name;
          return;
        }
      } catch {
        // the next name, then
      }
    }
    note.textContent = "Neither run recorded it as a curve.";
  })();
  return h("section", { class: "panel" }, title, chart.root, note);
}

function judgement(found: Answer, a: string[], b: string[]): HTMLElement {
  const pairs = (found["pairs"] ?? []) as Answer[];
  const reasons = [...((found["confounders"] ?? []) as string[]), ...((found["reasons"] ?? []) as string[])];
  const word = String(found["word"] ?? "");
  return h("section", { class: "panel judged", "data-word": word }, h("h3", {}, "Verdict over seeds"),
    h("p", { class: "sentence" }, h("span", { class: "kind" }, word.toLowerCase().replaceAll("_", " ")), " ", String(found["words"] ?? "").replace(/^[A-Z ]+(\(provisional\))?: ?/, "")),
    pairs.length > 1 && pairPlot(found, pairs),
    pairs.length > 0 && h("div", { class: "scroll", tabindex: 0 }, h("table", {}, h("thead", {}, h("tr", {}, ...["seed", "A", "B", "of A", "of B", "B − A"].map((name) => h("th", { class: "number" }, name)))),
      h("tbody", {}, ...pairs.map((one) => h("tr", {}, h("td", { class: "number" }, value(one["seed"])), ...["a", "b"].map((side) => h("td", { class: "number" }, ((one[side] ?? []) as string[]).join(" "))), h("td", { class: "number" }, loss(one["value_a"])), h("td", { class: "number" }, loss(one["value_b"])), h("td", { class: "number" }, signed(num(one["difference"])))))))),
    reasons.length > 0 && h("ul", { class: "plain-list" }, ...reasons.map((one) => h("li", {}, one))),
    found["what_next"] ? h("p", {}, h("b", {}, "Next: "), String(found["what_next"])) : "", pairs.length === 0 && copyable(`rung ab --judge ${a.join(" ")} -- ${b.join(" ")}`));
}

/** Each seed's difference as a dot, their mean with its interval, and nothing at zero. */
function pairPlot(found: Answer, pairs: Answer[]): HTMLElement {
  const differences = pairs.map((one) => num(one["difference"])).filter(Number.isFinite);
  const [low, high, effect] = [num(found["low"]), num(found["high"]), num(found["effect"])];
  const all = [...differences, 0, ...[low, high, effect].filter(Number.isFinite)];
  const from = Math.min(...all), to = Math.max(...all), span = to - from || 1;
  const width = 560, height = 84, x = (y: number): number => 60 + ((y - from) / span) * (width - 120);
  const made = s("svg", { viewBox: `0 0 ${width} ${height}`, class: "pairs", role: "img", "aria-label": `Differences of ${differences.length} pairs: ${differences.map((one) => short(one)).join(", ")}` },
    s("line", { x1: 30, x2: width - 30, y1: 58, y2: 58, class: "axis" }), s("line", { x1: x(0), x2: x(0), y1: 10, y2: 64, class: "zero" }), s("text", { x: x(0), y: 78, "text-anchor": "middle" }, "no difference"));
  if (Number.isFinite(low) && Number.isFinite(high)) made.append(s("line", { x1: x(low), x2: x(high), y1: 44, y2: 44, class: "interval" }), s("text", { x: Math.max(30, x(low)), y: 36, "text-anchor": "middle" }, signed(low, 3)), s("text", { x: x(high), y: 36, "text-anchor": "middle" }, signed(high, 3)));
  if (Number.isFinite(effect)) made.append(s("circle", { cx: x(effect), cy: 44, r: 5, class: "effect" }));
  for (const one of differences) made.append(s("circle", { cx: x(one), cy: 20, r: 4, class: "pair" }));
  return h("div", { class: "scroll" }, made);
}

function codeLine(code: Answer): string {
  const files = (code["files"] ?? []) as Answer[];
  if (code["problem"]) return String(code["problem"]);
  return files.length === 0 ? "the same" : `${files.length} file${files.length === 1 ? "" : "s"} changed`;
}

function patch(code: Answer): HTMLElement {
  const text = String(code["patch"] ?? "");
  const notes = (code["notes"] ?? []) as string[];
  if (text === "") return h("p", { class: "quiet" }, [code["problem"] ? String(code["problem"]) : "The code is the same.", ...notes].join(" "));
  const lines = text.split("\n"), most = 4000;
  return h("div", {}, h("pre", { class: "patch", tabindex: 0, "aria-label": "Changes of the code" }, ...lines.slice(0, most).map((line) => h("span", { class: /^(\+\+\+|---|diff |index )/.test(line) ? "file" : line.startsWith("@@") ? "hunk" : line.startsWith("+") ? "added" : line.startsWith("-") ? "removed" : null }, `${line}\n`))),
    lines.length > most && h("p", { class: "quiet" }, `${lines.length - most} more lines; rung diff --patch prints all.`), ...notes.map((note) => h("p", { class: "quiet" }, note)));
}
