// One run: the answer first, then how it got there, then all that is known; and beside it what people write.

import { ask, type Answer, curve, Refusal, type Row, send, theLab, write } from "./api";
import { Chart } from "./chart";
import { looks } from "./colours";
import { namesOf, smoothing, usual } from "./curves";
import { copyable, dialog, h, put, toast } from "./dom";
import { age, ago, bytes, duration, instant, isNumber, leaves, loss, num, plural, short, signed, value } from "./format";
import { follow } from "./live";
import { markdown } from "./markdown";
import { status, verdictWord } from "./runs";
import { choose, chosen, link, type Page } from "./state";

const WORDS = ["supported", "refuted", "inconclusive"];

export async function runPage(run: string): Promise<Page> {
  const [lab, known] = await Promise.all([theLab(), ask<Answer>(`run/${run}`)]);
  return await new RunView(run, known, lab.can_write).page();
}

class RunView {
  private charts: Chart[] = [];
  private stops: (() => void)[] = [];
  private readonly root = h("section", { class: "run" });

  constructor(private readonly run: string, private known: Answer, private readonly canWrite: boolean) {}

  async page(): Promise<Page> {
    const { known, run } = this;
    this.root.setAttribute("aria-label", run);
    const parent = typeof known["parent"] === "string" ? known["parent"] : null;
    const state = h("span", { class: "state" }, status(String(known["status"])));
    put(this.root,
      h("header", { class: "title" },
        h("h1", {}, run, " ", state),
        h("p", { class: "quiet" }, [known["recipe"], known["preset"]].filter(Boolean).join(" "), ...this.facts()),
        h("p", { class: "row" },
          h("a", { class: "button main", href: link("curves", { runs: [run, ...(parent === null ? [] : [parent])].join(",") }), onclick: () => choose([run, ...(parent === null ? [] : [parent])]) }, parent === null ? "Curves" : "Curves with its parent"),
          parent !== null && h("a", { class: "button", href: link("compare", { a: parent, b: run }) }, "Compare with ", parent),
          h("a", { class: "button", href: `#/health/${run}` }, Number(known["findings"]) > 0 ? `Health: ${plural(Number(known["findings"]), "finding")}` : "Health"),
          h("a", { class: "button", href: link("samples", { runs: run }) }, "Samples"),
          h("button", { type: "button", "aria-pressed": chosen.includes(run), onclick: (event: Event) => {
            choose(chosen.includes(run) ? chosen.filter((one) => one !== run) : [...chosen, run]);
            (event.currentTarget as HTMLElement).setAttribute("aria-pressed", String(chosen.includes(run)));
          } }, "Choose"))),
      h("div", { class: "with-side" },
        h("div", { class: "main-column" }, this.answer(), this.curves(), this.evals(), this.config(), this.events(), this.environment()),
        h("aside", { class: "side", "aria-label": "What people wrote" }, ...this.writing())));
    this.stops.push(follow([run], {
      rows: (_, rows) => {
        const step = rows.at(-1)?.["step"];
        if (typeof step === "number") this.root.querySelector("#steps")?.replaceChildren(`step ${short(step, 7)}`);
        this.renew();
      },
      runs: (rows) => {
        const mine = rows.find((row) => row["run"] === run);
        if (mine?.["status"] !== undefined) put(state, status(String(mine["status"])));
      },
    }));
    return { title: run, root: this.root, close: () => (this.stops.forEach((stop) => stop()), this.charts.forEach((chart) => chart.destroy())), key: (event) => this.key(event), keys: [["C", "its curves"], ["H", "its health"], ["N", "write a note"]] };
  }

  private renew: () => void = () => undefined;

  private key(event: KeyboardEvent): boolean {
    const key = event.key.toLowerCase();
    if (key === "c") location.hash = link("curves", { runs: this.run });
    else if (key === "h") location.hash = `#/health/${this.run}`;
    else if (key === "n") this.root.querySelector<HTMLElement>("#write-note")?.focus();
    else return false;
    return true;
  }

  private facts(): (Node | string)[] {
    const { known } = this;
    const planned = (known["derived"] as Answer | null)?.["num_steps"];
    const totals = (known["totals"] ?? {}) as Answer;
    const out: (Node | string)[] = [" · ", h("span", { id: "steps" }, known["step"] === null || known["step"] === undefined ? "nothing logged" : `step ${short(known["step"], 7)}${isNumber(planned) ? ` of ${short(planned, 7)}` : ""}`)];
    if (isNumber(totals["elapsed_s"])) out.push(` · ${duration(totals["elapsed_s"])}`);
    if (known["created"] !== undefined) out.push(" · ", h("time", { title: String(known["created"]) }, `started ${ago(known["created"])}`));
    if (known["reason"]) out.push(` · ${String(known["reason"])}`);
    return out;
  }

  /** What came of it, against what; what was changed and why. */
  private answer(): HTMLElement {
    const { known } = this;
    const best = (known["best"] ?? null) as Answer | null;
    const data = (known["data"] ?? {}) as Record<string, Answer>;
    const tiles: HTMLElement[] = [];
    const tile = (name: string, big: Node | string, small: Node | string = ""): void => void tiles.push(h("div", { class: "tile" }, h("dt", {}, name), h("dd", {}, h("b", {}, big), small !== "" && h("span", { class: "quiet" }, small))));
    if (best !== null && isNumber(best["loss"])) {
      tile(`Best loss on ${String(best["set"] ?? "its eval")}`, h("span", { title: String(best["loss"]) }, loss(best["loss"])), `at step ${short(best["step"], 7)}`);
      const baselines = (data[String(best["set"])]?.["baselines"] ?? {}) as Answer;
      for (const [name, given] of Object.entries(baselines)) if (isNumber(given)) tile(`Against ${name}`, signed(num(best["loss"]) - num(given)), `${name} loses ${loss(given)}`);
    }
    const against = known["against"] as Answer | undefined;
    if (against !== undefined && against !== null && typeof against["words"] === "string") tile("Against its parent", isNumber(against["gap"]) ? signed(num(against["gap"])) : "", against["words"]);
    const changed = typeof known["changed"] === "string" ? known["changed"] : "";
    const rows: [string, Node | string][] = [];
    if (changed !== "") rows.push(["Changed", changed]);
    if (known["why"]) rows.push(["Hypothesis", String(known["why"])]);
    const tags = (known["tags"] ?? []) as string[];
    if (tags.length > 0) rows.push(["Tags", h("span", { class: "tags" }, ...tags.map((tag) => h("span", { class: "tag" }, tag)))]);
    return h("section", { class: "answer", "aria-label": "What came of it" }, tiles.length > 0 && h("dl", { class: "tiles" }, ...tiles),
      rows.length > 0 && h("dl", { class: "facts" }, ...rows.flatMap(([name, text]) => [h("dt", {}, name), h("dd", {}, text)])));
  }

  private curves(): HTMLElement {
    const names = usual(namesOf(this.known)).slice(0, 4);
    const grid = h("div", { class: "panels" });
    const shows: (() => void)[] = [];
    const drawAll: (() => void)[] = [];
    for (const metric of names) {
      const chart = new Chart({ height: 200, sync: `run ${this.run}`, onZoom: (range) => (asked = range, shows.forEach((show) => show())), onPick: (x) => (location.hash = link("samples", { runs: this.run, step: Math.round(x) })) });
      let asked: [number, number] | null = null;
      this.charts.push(chart);
      const note = h("p", { class: "note quiet" });
      let lines: Awaited<ReturnType<typeof curve>> | null = null;
      const draw = (): void => {
        if (lines === null) return;
        chart.show({ metric, x: "step", range: asked, lines: lines.series.map((one) => ({ ...one, label: one.run, look: looks([this.run]).get(this.run)! })) });
      };
      const show = async (): Promise<void> => {
        try {
          lines = await curve({ runs: this.run, metric, x: "step", from: asked?.[0], to: asked?.[1], points: 600, smooth: smoothing(metric, 0.6) });
          draw();
          const reading = lines.reading?.[0];
          note.textContent = reading === undefined ? lines.series.length === 0 ? lines.errors?.[0]?.message ?? "not recorded" : "" : `Reading it for the first time: ${bytes(reading.done_bytes)} of ${bytes(reading.total_bytes)}`;
          if (reading !== undefined) this.later(() => void show());
        } catch (problem) {
          note.textContent = problem instanceof Refusal ? problem.message : "The server does not answer.";
        }
      };
      shows.push(() => void show());
      drawAll.push(draw);
      grid.append(h("article", { class: "panel", "aria-label": metric }, h("header", { class: "row" }, h("h3", {}, metric)), chart.root, note));
      void show();
    }
    let timer = 0;
    this.renew = () => {
      clearTimeout(timer);
      timer = window.setTimeout(() => shows.forEach((show) => show()), 300);
    };
    const redraw = (): void => drawAll.forEach((draw) => draw());
    addEventListener("rung-theme", redraw);
    this.stops.push(() => (removeEventListener("rung-theme", redraw), clearTimeout(timer)));
    return h("section", { "aria-label": "Curves" }, names.length > 0 ? grid : h("p", { class: "quiet" }, "Nothing was logged yet."));
  }

  private later(call: () => void): void {
    const timer = window.setTimeout(call, 200);
    this.stops.push(() => clearTimeout(timer));
  }

  private evals(): HTMLElement | false {
    const evals = ((this.known["evals"] ?? []) as Answer[]).filter((one) => typeof one === "object");
    if (evals.length === 0) return false;
    const names = [...new Set(evals.flatMap((one) => Object.keys(one).filter((name) => isNumber(one[name]) && name !== "step")))];
    names.sort((a, b) => Number(b === "loss") - Number(a === "loss") || Number(b === "loss_se") - Number(a === "loss_se"));
    const best = (this.known["best"] ?? {}) as Answer;
    const rows = [...evals].reverse().slice(0, 200).map((one) => {
      const isBest = one["step"] === best["step"] && one["set"] === best["set"];
      return h("tr", { class: isBest ? "best" : null }, h("td", { class: "number" }, h("a", { href: link("curves", { runs: this.run, at: String(one["step"]), metrics: names.includes("loss") ? `eval/${one["set"]}/loss` : "" }) }, short(one["step"], 8))), h("td", {}, String(one["set"] ?? "")), ...names.map((name) => h("td", { class: "number", title: String(one[name] ?? "") }, name.endsWith("loss") ? loss(one[name]) : short(one[name]))));
    });
    return section("Evals", `${evals.length}`, h("div", { class: "scroll", tabindex: 0 }, h("table", {}, h("thead", {}, h("tr", {}, h("th", { class: "number" }, "step"), h("th", {}, "set"), ...names.map((name) => h("th", { class: "number" }, name)))), h("tbody", {}, ...rows))), evals.length <= 12);
  }

  private config(): HTMLElement {
    const sources = (this.known["sources"] ?? {}) as Record<string, string>;
    const flat = leaves(this.known["config"]);
    const keys = Object.keys(flat);
    const isOwn = (key: string): boolean => sources[key] !== undefined && sources[key] !== "default";
    const body = h("tbody");
    let hasAll = keys.length > 0 && !keys.some(isOwn);
    const search = h("input", { type: "search", placeholder: "Search keys", "aria-label": "Search config keys", oninput: () => fill() });
    const all = h("input", { type: "checkbox", checked: hasAll, onchange: () => ((hasAll = all.checked), fill()) });
    const fill = (): void => {
      const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
      const shown = keys.filter((key) => (hasAll || words.length > 0 || isOwn(key)) && words.every((word) => `${key} ${value(flat[key])}`.toLowerCase().includes(word)));
      put(body, ...shown.map((key) => h("tr", { class: isOwn(key) ? "own" : null }, h("th", { scope: "row" }, key), h("td", {}, value(flat[key])), h("td", { class: "quiet" }, sources[key] ?? ""))));
    };
    fill();
    return section("Settings", `${keys.filter(isOwn).length} of ${keys.length} are not defaults`, h("div", {}, h("div", { class: "row" }, search, h("label", { class: "row" }, all, " all keys")), h("div", { class: "scroll", tabindex: 0 }, h("table", { class: "config" }, body))), true);
  }

  private events(): HTMLElement | false {
    const events = ((this.known["events"] ?? []) as Answer[]).filter((one) => !["eval", "sample"].includes(String(one["kind"])));
    if (events.length === 0) return false;
    const rows = [...events].reverse().slice(0, 300).map((one) => {
      const text = Object.entries(one).filter(([name, given]) => !["kind", "step", "unix_s", "segment"].includes(name) && given !== null && given !== "")
        .map(([name, given]) => (name === "text" ? String(given) : typeof given === "object" ? `${name} (${Array.isArray(given) ? given.length : Object.keys(given as object).length})` : `${name} ${value(given)}`)).join(", ");
      return h("tr", {}, h("td", { class: "number" }, short(one["step"], 8)), h("td", {}, String(one["kind"])), h("td", { class: "wrap" }, text), h("td", { class: "quiet number", title: instant(one["unix_s"])?.toLocaleString() ?? null }, age(one["unix_s"])));
    });
    return section("Events", `${events.length}`, h("div", { class: "scroll", tabindex: 0 }, h("table", {}, h("tbody", {}, ...rows))), false);
  }

  private environment(): HTMLElement {
    const { known } = this;
    const code = (known["code"] ?? {}) as Answer, environment = (known["environment"] ?? {}) as Answer;
    const command = ((known["command"] ?? []) as unknown[]).map(String);
    if (command.length > 0) command[0] = command[0]!.endsWith("__main__.py") ? "rung" : command[0]!.split("/").at(-1)!;
    const quoted = command.map((word) => (/^[\w@%+=:,./-]+$/.test(word) ? word : `'${word.replaceAll("'", "'\\''")}'`)).join(" ");
    const rows: [string, Node | string][] = [
      ["Code", [code["kind"], String(code["head"] ?? "").slice(0, 12), code["dirty"] === true ? "with changes" : "", code["ref"], code["warning"] ?? code["reason"]].filter(Boolean).join(" ")],
      ["Data", Object.entries((known["data"] ?? {}) as Record<string, Answer>).map(([name, one]) => `${name} ${String(one?.["fingerprint"] ?? "")}`).join(", ")],
      ["Versions", Object.entries((known["versions"] ?? {}) as Answer).map(([name, one]) => `${name} ${one}`).join("  ")],
      ["Machine", [environment["host"], (environment["cpu"] as Answer | undefined)?.["model"], environment["platform"]].filter(Boolean).join(" · ")],
      ["Seed", value(known["seed"])],
      ["Checkpoints", ((known["checkpoints"] ?? []) as string[]).map((name) => name.replace(/^0+(?=\d)/, "")).join(" ")],
      ["On disk", `${bytes(known["disk_bytes"])} in ${String(known["path"] ?? "")}`],
    ];
    return section("Where it came from", "", h("div", {}, quoted !== "" && copyable(quoted), h("dl", { class: "facts" }, ...rows.filter(([, text]) => text !== "").flatMap(([name, text]) => [h("dt", {}, name), h("dd", {}, text)]))), true);
  }

  private writing(): (Node | false)[] {
    const { known, run, canWrite } = this;
    const word = verdictWord(known["verdict"]);
    const said = typeof known["verdict"] === "object" ? String((known["verdict"] as Answer | null)?.["text"] ?? "") : "";
    const form = (name: string, label: string, fields: (Node | string)[], body: () => Answer, button = "Save"): HTMLElement =>
      h("form", { class: "write", id: `form-${name}`, "aria-label": label, onsubmit: (event: Event) => {
        event.preventDefault();
        void this.send(name, body());
      } }, ...fields, h("button", { type: "submit", class: "small" }, button));
    const why = h("textarea", { id: "write-hypothesis", rows: 2, value: String(known["why"] ?? ""), placeholder: "What should this run show?" });
    const choice = h("select", { id: "write-verdict", "aria-label": "Verdict" }, h("option", { value: "" }, "no verdict"), ...WORDS.map((one) => h("option", { value: one }, one)));
    choice.value = word;
    const because = h("textarea", { id: "write-verdict-text", rows: 2, value: said, "aria-label": "Why this verdict", placeholder: "Because …" });
    const note = h("textarea", { id: "write-note", rows: 3, "aria-label": "A new note, in Markdown", placeholder: "Markdown: **bold**, `code`, - lists, [piano/2](piano/2)" });
    const tags = h("input", { id: "write-tags", value: ((known["tags"] ?? []) as string[]).join(" "), placeholder: "baseline keep", autocomplete: "off" });
    const written = this.notes();
    if (!canWrite) {
      return [
        word !== "" && h("section", {}, h("h2", {}, "Verdict"), h("p", {}, h("b", {}, word), said !== "" && ` ${said}`)), h("section", {}, h("h2", {}, "Notes"), written),
      ];
    }
    return [
      h("section", {}, h("h2", {}, h("label", { for: "write-hypothesis" }, "Hypothesis")), form("hypothesis", "Hypothesis", [why], () => ({ text: why.value }))),
      h("section", {}, h("h2", {}, "Verdict"), form("verdict", "Verdict", [choice, because], () => ({ verdict: choice.value === "" ? null : choice.value, text: because.value }))),
      h("section", {}, h("h2", {}, "Notes"), form("note", "Note", [note], () => ({ text: note.value }), "Add note"), written),
      h("section", {}, h("h2", {}, h("label", { for: "write-tags" }, "Tags")), form("tags", "Tags", [tags], () => ({ tags: tags.value.split(/[\s,]+/).filter(Boolean) }))),
      h("section", {}, h("h2", {}, "The run itself"), h("p", { class: "row" },
        h("button", { type: "button", class: "small", onclick: () => this.rename() }, "Rename"),
        h("button", { type: "button", class: "small danger", onclick: () => this.trash() }, "Move to trash")), h("p", { class: "quiet" }, `The folder is runs/${run}.`)),
    ];
  }

  private notes(): HTMLElement {
    const notes = (this.known["notes"] ?? []) as Answer[];
    if (notes.length === 0) return h("p", { class: "quiet notes" }, this.canWrite ? "No note yet." : "No note was written.");
    return h("ol", { class: "notes" }, ...[...notes].reverse().map((one) => h("li", {}, h("time", { class: "quiet", title: instant(one["unix_s"])?.toLocaleString() ?? null }, ago(one["unix_s"])), markdown(String(one["text"] ?? "")))));
  }

  private async send(what: string, body: Answer): Promise<void> {
    try {
      await write<Row>(this.run, what, body);
    } catch (problem) {
      toast(problem instanceof Refusal ? problem.message : "The server does not answer; nothing was written.", true);
      return;
    }
    const undo: [string, () => void] = ["Undo", () => void this.send("note", { undo: true })];
    toast("Saved", false, what === "note" && body["undo"] !== true ? undo : undefined);
    this.known = await ask<Answer>(`run/${this.run}`);
    // What stands in the other fields, unsaved, stays there.
    if (what === "note" && body["undo"] !== true) this.root.querySelector<HTMLTextAreaElement>("#write-note")!.value = "";
    this.root.querySelector(".notes")!.replaceWith(this.notes());
    this.root.querySelector(".answer")!.replaceWith(this.answer());
  }

  private rename(): void {
    const name = h("input", { value: this.run, "aria-label": "New name, as experiment/number or an experiment", autocomplete: "off", spellcheck: "false" });
    const made = dialog(`Rename ${this.run}`, h("p", { class: "quiet" }, "Another experiment, or experiment/number. Its runs below it keep their parent."), name, h("p", { class: "row" }, h("button", { type: "button", class: "main", onclick: () => void go() }, "Rename")));
    const go = async (): Promise<void> => {
      try {
        const row = await write<Answer>(this.run, "rename", { name: name.value.trim() });
        made.close();
        choose(chosen.filter((one) => one !== this.run));
        location.hash = `#/run/${typeof row["run"] === "string" ? row["run"] : name.value.trim()}`;
      } catch (problem) {
        toast(problem instanceof Refusal ? problem.message : "The server does not answer; nothing was renamed.", true);
      }
    };
    name.select();
  }

  private trash(): void {
    const said = h("p", { role: "alert", class: "bad" });
    const button = h("button", { type: "button", class: "danger", onclick: () => void go() }, "Move to trash");
    const made = dialog(`Move ${this.run} to the trash?`, h("p", {}, "Its folder moves to the trash of the lab, with its checkpoints. ", h("code", {}, "rung rm --undo"), " brings it back."), said, h("p", { class: "row" },
      button, h("button", { type: "button", onclick: () => made.close() }, "Keep it")));
    let isForced = false;
    const go = async (): Promise<void> => {
      try {
        await write(this.run, "trash", { force: isForced });
      } catch (problem) {
        said.textContent = problem instanceof Refusal ? problem.message : "The server does not answer; nothing was moved.";
        isForced = problem instanceof Refusal; // other runs may need it: the second press is meant
        button.textContent = "Move it all the same";
        return;
      }
      made.close();
      choose(chosen.filter((one) => one !== this.run));
      location.hash = "#/runs";
      toast(`${this.run} is in the trash. `, false, ["Undo", () => void this.restore()]);
    };
  }

  private async restore(): Promise<void> {
    try {
      await send("api/restore", { run: this.run });
      location.hash = `#/run/${this.run}`;
    } catch (problem) {
      toast(problem instanceof Refusal ? problem.message : "The server does not answer.", true);
    }
  }
}

export function section(title: string, aside: string, content: Node, isOpen: boolean): HTMLDetailsElement {
  return h("details", { class: "section", open: isOpen }, h("summary", {}, h("h2", {}, title), aside !== "" && h("span", { class: "quiet" }, aside)), content);
}
