// Every run of the lab as a table: only the rows in sight are elements, so a thousand scroll as ten do.

import { ask, isExport, Refusal, type Row, theLab } from "./api";
import { looks } from "./colours";
import { swatch } from "./chart";
import { dialog, empty, h, isDark, put, quietly } from "./dom";
import { age, duration, instant, isNumber, leaves, loss, num, plural, short, value } from "./format";
import { follow } from "./live";
import { choose, chosen, link, onChosen, type Page, remember } from "./state";

interface Column {
  key: string;
  title: string;
  width: string;
  isNumber?: boolean;
  sort: string;
  cell: (row: Row) => Node | string;
  hint?: (row: Row) => string;
}
interface Spread {
  mean: unknown;
  sd: unknown;
  n: number;
}
interface Group {
  runs: string[];
  n: number;
  why?: string | null;
  [column: string]: Spread | unknown;
}

const FILTER_HINT = "lr.learning_rate>1e-4   status=running   tag=best   /regex/";

export async function runsPage(query: URLSearchParams): Promise<Page> {
  const view = new Runs(query);
  const hasAny = await view.load();
  if (view.isLost) throw new TypeError("no answer");
  if (!hasAny && query.toString() === "") {
    view.close();
    return {
      title: "Runs",
      root: empty("No runs yet", "A run appears here as soon as it starts. This trains a small piano model in about three minutes:", "rung data piano && rung train piano"),
    };
  }
  return view.page();
}

class Runs {
  private rows: Row[] = []; // as they came
  private shown: Row[] = []; // filtered, in order, as a tree or not
  private depth = new Map<string, number>();
  private columns: string[];
  private sort: string;
  private isDown: boolean;
  private isTree: boolean;
  private isGrouped: boolean;
  private groups: Group[] | null = null;
  private at = 0; // the row that the arrow keys are on
  private first = -1;
  private end = -1;
  private lastClick = -1;
  private problem = "";
  private errors: { run: string | null; message: string }[] = [];
  private request = 0;
  private stop: () => void = () => undefined;
  private readonly root: HTMLElement;
  private readonly head = h("div", { class: "thead", role: "row" });
  private readonly space = h("div", { class: "tspace" });
  private readonly body = h("div", { class: "tbody", role: "rowgroup", tabindex: 0, "aria-label": "Runs: arrow keys move, space chooses, Enter opens" });
  private readonly grid = h("div", { class: "runs-grid", role: "grid", "aria-label": "Runs", "aria-multiselectable": "true" });
  private readonly count = h("span", { class: "quiet", role: "status", id: "count" });
  private readonly message = h("p", { class: "bad", role: "alert", hidden: true });
  private readonly bar = h("div", { class: "chosen-bar", hidden: true });
  private readonly filter: HTMLInputElement;
  private readonly experiment: HTMLSelectElement;

  private total = 0;
  private isClosed = false;
  isLost = false; // the server did not answer at all

  constructor(query: URLSearchParams) {
    this.columns = query.get("columns")?.split(",").filter(Boolean) ?? [];
    this.sort = query.get("sort") ?? "";
    this.isDown = query.get("down") === "1";
    this.isTree = query.get("tree") !== "0" && this.sort === "";
    this.isGrouped = query.get("group") === "1" && !isExport;
    const later = quietly(() => void this.load(), 160);
    this.filter = h("input", {
      type: "search", class: "filter", placeholder: FILTER_HINT, "aria-label": "Filter runs: a condition such as lr.learning_rate>1e-4, or /regex/ over name, note and tags",
      value: query.get("query") ?? "", oninput: later, spellcheck: "false", autocomplete: "off",
    });
    this.experiment = h("select", { "aria-label": "Experiment", onchange: () => void this.load() },
      h("option", { value: "" }, "All experiments"), query.has("experiment") && h("option", { value: query.get("experiment") }, query.get("experiment")));
    this.experiment.value = query.get("experiment") ?? "";
    this.space.append(this.body);
    this.grid.append(this.head, this.space);
    this.grid.addEventListener("scroll", () => this.draw(), { passive: true });
    const tree = h("button", { type: "button", "aria-pressed": this.isTree, onclick: () => this.toggleTree(tree) }, "Tree");
    const group = h("button", { type: "button", "aria-pressed": this.isGrouped, hidden: isExport, onclick: () => this.toggleGroups(group), title: "One row for runs that differ in their seed alone: mean ± standard deviation" }, "Group seeds");
    this.root = h("section", { class: "runs", "aria-label": "Runs" },
      h("div", { class: "toolbar" }, this.filter, this.experiment, tree, group,
        h("button", { type: "button", onclick: () => void this.chooseColumns() }, "Columns"), this.count),
      this.message, this.grid, this.bar);
    this.body.addEventListener("keydown", (event) => this.press(event));
    this.body.addEventListener("click", (event) => this.click(event));
  }

  close(): void {
    this.isClosed = true;
    this.stop();
  }

  page(): Page {
    const forget = onChosen(() => (this.showBar(), this.draw(true)));
    const resized = new ResizeObserver(() => (this.showHead(), this.draw(true)));
    resized.observe(this.grid);
    this.showBar();
    return {
      title: "Runs", root: this.root,
      close: () => (forget(), resized.disconnect(), this.close()),
      key: (event) => this.key(event),
      keys: [["↑ ↓", "move"], ["Space", "choose a run"], ["A", "choose all that are shown, or none"], ["Enter", "open it"], ["C", "curves of the chosen runs"], ["D", "compare the two that were chosen first"]],
    };
  }

  private groupColumns(): string[] {
    return ["best", "step", ...this.columns.filter((name) => name !== "best" && name !== "step")];
  }

  /** Asks for the rows and shows them; false where the lab has none at all. */
  async load(): Promise<boolean> {
    const mine = ++this.request;
    this.remember();
    const query = this.filter.value.trim();
    try {
      const columns = this.isGrouped ? this.groupColumns() : this.columns;
      const asked = { query, columns: columns.join(","), experiment: this.experiment.value, group: this.isGrouped ? 1 : "" };
      const answer = await ask<{ runs: Row[]; groups?: Group[]; errors?: { run: string | null; message: string }[] }>("runs", asked);
      if (mine !== this.request) return true;
      this.groups = this.isGrouped ? answer.groups ?? null : null;
      this.rows = isExport ? here(answer.runs, query, this.experiment.value) : answer.runs;
      this.errors = answer.errors ?? [];
      this.problem = "";
    } catch (problem) {
      if (mine !== this.request) return true;
      this.problem = problem instanceof Refusal || problem instanceof Error ? problem.message : String(problem);
      if (!(problem instanceof Refusal)) this.isLost = true;
      if (!(problem instanceof Refusal)) this.problem = `The server does not answer (${this.problem}).`;
    }
    this.message.hidden = this.problem === "";
    this.message.textContent = this.problem;
    this.filter.setAttribute("aria-invalid", String(this.problem !== ""));
    if (this.problem === "") {
      const isAll = query === "" && this.experiment.value === "";
      if (isAll) this.list(this.rows);
      else if (this.total === 0) void ask<{ runs: Row[] }>("runs").then(({ runs }) => (this.list(runs), this.arrange(true)), () => undefined);
      this.arrange();
    }
    if (this.isClosed) return true;
    const isFollowing = this.rows.some((row) => row.status === "running");
    this.stop();
    this.stop = follow(isFollowing ? this.rows.filter((row) => row.status === "running").slice(0, 20).map((row) => row.run) : [], {
      runs: (rows, gone) => this.heard(rows as Partial<Row>[], gone),
      rows: (run, rows) => {
        const row = this.rows.find((one) => one.run === run), step = rows.at(-1)?.["step"];
        if (row !== undefined && typeof step === "number") (row.steps = step), this.draw(true);
      },
    }, ["loss"]);
    return this.problem !== "" || this.rows.length > 0;
  }

  /** The experiments to choose from, of all rows. */
  private list(rows: Row[]): void {
    const sizes = new Map<string, number>();
    for (const row of rows) sizes.set(row.experiment, (sizes.get(row.experiment) ?? 0) + 1);
    this.total = rows.length;
    const now = this.experiment.value;
    put(this.experiment, h("option", { value: "" }, `All experiments (${rows.length})`), ...[...sizes].map(([name, size]) => h("option", { value: name }, `${name} (${size})`)));
    this.experiment.value = now;
  }

  /** New statuses at once; runs that are new, by asking for the list again. */
  private heard(changed: Partial<Row>[], gone: string[]): void {
    let isNew = gone.some((run) => this.rows.some((row) => row.run === run));
    for (const one of changed) {
      const row = this.rows.find((known) => known.run === one.run);
      if (row === undefined) isNew = true;
      else {
        if (one.status !== row.status && one.status === "running") isNew = true;
        Object.assign(row, { ...one, values: { ...row.values, ...one.values } });
      }
    }
    if (isNew) void this.load();
    else this.arrange(true);
  }

  private remember(): void {
    remember("runs", {
      query: this.filter.value.trim(), experiment: this.experiment.value, sort: this.sort, down: this.isDown ? 1 : "",
      columns: this.columns.join(","), tree: this.isTree || this.sort !== "" ? "" : "0", group: this.isGrouped ? 1 : "",
    });
  }

  private arrange(isKept = false): void {
    const rows = [...this.rows];
    this.depth.clear();
    if (this.sort !== "") {
      const column = this.all().find((one) => one.sort === this.sort);
      const of = (row: Row): unknown => (column === undefined ? row.values?.[this.sort] : sortable(row, this.sort));
      rows.sort((a, b) => order(of(a), of(b), this.isDown));
      this.shown = rows;
    } else if (this.isTree) this.shown = this.tree(rows);
    else this.shown = rows.sort((a, b) => (instant(b.started)?.getTime() ?? 0) - (instant(a.started)?.getTime() ?? 0) || b.run.localeCompare(a.run, "en", { numeric: true }));
    if (!isKept) this.at = Math.min(this.at, Math.max(0, this.shown.length - 1));
    const total = this.total || this.rows.length;
    const shown = this.groups === null ? this.shown.length : this.groups.length;
    this.count.textContent = this.groups !== null ? plural(shown, "group") : shown === total ? plural(total, "run") : `${shown} of ${plural(total, "run")}`;
    if (this.errors.length > 0) this.count.textContent += `, ${this.errors.length} cannot be read`;
    this.count.title = this.errors.map((one) => (one.run === null ? one.message : `${one.run}: ${one.message}`)).join("\n");
    this.showHead();
    this.draw(true);
  }

  /** Experiments with their newest run first; in each, attempts below the run they came from. */
  private tree(rows: Row[]): Row[] {
    const known = new Map(rows.map((row) => [row.run, row]));
    const children = new Map<string, Row[]>(), roots: Row[] = [];
    for (const row of rows) {
      const parent = row.parent !== null && row.parent !== row.run && known.has(row.parent) ? row.parent : null;
      if (parent === null) roots.push(row);
      else children.set(parent, [...(children.get(parent) ?? []), row]);
    }
    const byNumber = (a: Row, b: Row): number => a.experiment.localeCompare(b.experiment) || a.number - b.number;
    const out: Row[] = [], seen = new Set<string>();
    const waiting: [Row, number][] = roots.sort(byNumber).reverse().map((row) => [row, 0]);
    while (waiting.length > 0) {
      const [row, depth] = waiting.pop()!;
      if (seen.has(row.run)) continue;
      seen.add(row.run);
      this.depth.set(row.run, depth);
      out.push(row);
      waiting.push(...(children.get(row.run) ?? []).sort(byNumber).reverse().map((one): [Row, number] => [one, depth + 1]));
    }
    for (const row of rows) if (!seen.has(row.run)) out.push(row); // a circle of parents
    return out;
  }

  private all(): Column[] {
    const state = (row: Row): Node => status(row.status);
    const fixed: Column[] = [
      { key: "run", title: "Run", width: "minmax(150px, 1.1fr)", sort: "run", cell: (row) => this.name(row) },
      { key: "status", title: "Status", width: "96px", sort: "status", cell: state },
      { key: "loss", title: "Best loss", width: "82px", isNumber: true, sort: "loss", cell: (row) => loss(bestOf(row)), hint: (row) => String(bestOf(row) ?? "") },
      { key: "steps", title: "Steps", width: "76px", isNumber: true, sort: "steps", cell: (row) => short(row.steps, 6) },
    ];
    const own = this.columns.map((name): Column => ({
      key: `x-${name}`, title: name, width: "minmax(92px, 0.5fr)", isNumber: this.rows.some((row) => isNumber(row.values?.[name])), sort: name,
      cell: (row) => (isNumber(row.values?.[name]) ? short(row.values[name], 5) : value(row.values?.[name] ?? "")), hint: (row) => `${name} = ${value(row.values?.[name] ?? "not set")}`,
    }));
    const last: Column[] = [
      { key: "changed", title: "What changed, and why", width: "minmax(200px, 2.2fr)", sort: "changed", cell: changes, hint: (row) => [...(row.changed ?? []).map(([key, a, b]) => `${key} ${value(a)} → ${value(b)}`), row.why ?? "", row.note ?? ""].filter(Boolean).join("\n") },
      { key: "tags", title: "Tags", width: "minmax(60px, 0.5fr)", sort: "tags", cell: (row) => h("span", { class: "tags" }, ...(row.tags ?? []).map((tag) => h("span", { class: "tag" }, tag))) },
      { key: "wall", title: "Took", width: "76px", isNumber: true, sort: "wall_s", cell: (row) => duration(row.wall_s) },
      { key: "age", title: "Age", width: "66px", isNumber: true, sort: "started", cell: (row) => age(row.started), hint: (row) => instant(row.started)?.toLocaleString() ?? "" },
    ];
    return [...fixed, ...own, ...last];
  }

  private get isNarrow(): boolean {
    return this.grid.clientWidth < 720;
  }

  private get height(): number {
    return this.isNarrow ? 56 : 33;
  }

  private template(): string {
    if (this.isNarrow) return "36px minmax(0, 1fr) 96px";
    const room = this.grid.clientWidth;
    const columns = this.visible();
    return `34px ${columns.map((column) => column.width).join(" ")}${room === 0 ? "" : ""}`;
  }

  /** Columns that matter least are left out first where there is no room. */
  private visible(): Column[] {
    let columns = this.all();
    const room = this.grid.clientWidth;
    const least = (column: Column): number => Number(/(\d+)px/.exec(column.width)?.[1] ?? 80);
    for (const drop of ["tags", "wall", "age"]) {
      if (52 + columns.reduce((sum, one) => sum + least(one) + 12, 0) <= room) break; // with the box, gaps and edges
      columns = columns.filter((one) => one.key !== drop);
    }
    return columns;
  }

  private showHead(): void {
    if (this.groups !== null) {
      const names = this.groupColumns();
      this.grid.style.setProperty("--columns", `minmax(220px, 3fr) 60px ${names.map(() => "minmax(130px, 1fr)").join(" ")}`);
      put(this.head, h("div", { role: "columnheader" }, "Runs that differ in their seed alone"), h("div", { role: "columnheader", class: "number" }, "n"),
        ...names.map((name) => h("div", { role: "columnheader", class: "number" }, name === "best" ? "best loss" : name)));
      return;
    }
    this.grid.style.setProperty("--columns", this.template());
    const isAll = this.shown.length > 0 && this.shown.every((row) => chosen.includes(row.run));
    const box = h("input", { type: "checkbox", "aria-label": "Choose all that are shown", checked: isAll, onchange: () => this.chooseAll() });
    box.indeterminate = !isAll && this.shown.some((row) => chosen.includes(row.run));
    const columns = this.isNarrow ? this.all().filter((one) => one.key === "run" || one.key === "loss") : this.visible();
    put(this.head, h("div", { role: "columnheader", class: "check" }, box), ...columns.map((column) => {
      const isSorted = this.sort === column.sort;
      const sorted = isSorted ? (this.isDown ? "descending" : "ascending") : "none";
      return h("div", { role: "columnheader", "aria-sort": sorted, class: column.isNumber ? "number" : null },
        h("button", { type: "button", class: "sort", title: `Sort by ${column.title}`, onclick: () => this.sortBy(column) }, column.title, isSorted && h("span", { "aria-hidden": "true" }, this.isDown ? " ↓" : " ↑")));
    }));
  }

  private sortBy(column: Column): void {
    if (this.sort !== column.sort) (this.sort = column.sort), (this.isDown = false);
    else if (!this.isDown) this.isDown = true;
    else (this.sort = ""), (this.isDown = false);
    this.remember();
    this.arrange();
  }

  private draw(isAnew = false): void {
    const total = this.groups?.length ?? this.shown.length;
    this.space.style.height = `${Math.max(1, total) * this.height}px`;
    this.grid.setAttribute("aria-rowcount", String(total + 1));
    if (total === 0) {
      const none = this.problem === "" && this.request > 0 && this.rows.length === 0;
      put(this.body, none && h("div", { class: "none" }, "No run is like that. ", h("button", { type: "button", class: "plain", onclick: () => this.clear() }, "Clear the filter")));
      this.body.style.transform = "";
      this.first = this.end = -1;
      return;
    }
    const from = Math.max(0, Math.floor((this.grid.scrollTop - 40) / this.height) - 6);
    const end = Math.min(total, Math.ceil((this.grid.scrollTop + this.grid.clientHeight) / this.height) + 6);
    if (!isAnew && from === this.first && end === this.end) return;
    [this.first, this.end] = [from, end];
    this.body.style.transform = `translateY(${from * this.height}px)`;
    const colours = looks(chosen);
    const rows: HTMLElement[] = [];
    const columns = this.isNarrow ? [] : this.visible();
    for (let i = from; i < end; i += 1) rows.push(this.groups !== null ? this.groupRow(this.groups[i]!, i) : this.row(this.shown[i]!, i, columns, colours));
    put(this.body, rows);
    this.body.setAttribute("aria-activedescendant", `row-${this.at}`);
  }

  private row(row: Row, i: number, columns: Column[], colours: ReturnType<typeof looks>): HTMLElement {
    const look = colours.get(row.run);
    const isChosen = look !== undefined;
    const box = h("input", { type: "checkbox", tabindex: -1, checked: isChosen, "aria-label": `Choose ${row.run}` });
    const check = h("div", { role: "gridcell", class: "check" }, box);
    if (look !== undefined) box.style.accentColor = isDark() ? look.dark : look.light;
    const cells = this.isNarrow
      ? [h("div", { role: "gridcell", class: "two" }, this.name(row), h("div", { class: "second" }, status(row.status), " ", changes(row))),
         h("div", { role: "gridcell", class: "number two" }, h("div", {}, loss(bestOf(row)) || "–"), h("div", { class: "second" }, short(row.steps, 6)))]
      : columns.map((column) => h("div", { role: "gridcell", class: column.isNumber ? "number" : column.key === "changed" ? "changed" : null, title: column.hint?.(row) || null }, column.cell(row)));
    return h("div", { role: "row", class: "trow", id: `row-${i}`, "data-i": i, "data-run": row.run, "aria-rowindex": i + 2, "aria-selected": isChosen, "data-at": i === this.at ? "" : null }, check, ...cells);
  }

  private name(row: Row): HTMLElement {
    const depth = this.sort === "" && this.isTree ? this.depth.get(row.run) ?? 0 : 0;
    const made = h("span", { class: "name" }, depth > 0 && h("span", { class: "twig", "aria-hidden": "true" }, "└"), h("a", { href: `#/run/${row.run}`, tabindex: -1 }, row.run), verdictMark(row.verdict));
    made.style.paddingLeft = `${Math.min(depth, 8) * 12}px`;
    return made;
  }

  private groupRow(group: Group, i: number): HTMLElement {
    const words = group.runs.slice(0, 4).join(", ") + (group.runs.length > 4 ? " …" : "");
    return h("div", { role: "row", class: "trow", id: `row-${i}`, "data-i": i },
      h("div", { role: "gridcell", title: group.runs.join(", ") }, h("a", { href: link("curves", { runs: group.runs.slice(0, 24).join(",") }) }, words), group.why && h("span", { class: "why" }, ` ${group.why}`)),
      h("div", { role: "gridcell", class: "number" }, String(group.runs.length)),
      ...this.groupColumns().map((name) => h("div", { role: "gridcell", class: "number" }, spread(group[name]))));
  }

  private click(event: MouseEvent): void {
    const element = event.target as HTMLElement;
    const holder = element.closest<HTMLElement>(".trow");
    if (holder === null || element.closest("a") !== null || this.groups !== null) return;
    const i = Number(holder.dataset["i"]);
    this.at = i;
    if (event.shiftKey && this.lastClick >= 0) {
      const [a, b] = [Math.min(i, this.lastClick), Math.max(i, this.lastClick)];
      choose([...chosen, ...this.shown.slice(a, b + 1).map((row) => row.run)]);
    } else this.toggle(i);
    this.lastClick = i;
    this.body.focus({ preventScroll: true });
  }

  private toggle(i: number): void {
    const run = this.shown[i]?.run;
    if (run === undefined) return;
    choose(chosen.includes(run) ? chosen.filter((one) => one !== run) : [...chosen, run]);
    this.showHead();
  }

  private chooseAll(): void {
    const isAll = this.shown.every((row) => chosen.includes(row.run));
    choose(isAll ? [] : this.shown.map((row) => row.run));
    this.showHead();
  }

  private press(event: KeyboardEvent): void {
    if (event.ctrlKey || event.metaKey || event.altKey || this.groups !== null) return;
    const page = Math.max(1, Math.floor(this.grid.clientHeight / this.height) - 2), last = this.shown.length - 1;
    const moves: Record<string, number> = {
      ArrowDown: this.at + 1, ArrowUp: this.at - 1, j: this.at + 1, k: this.at - 1, PageDown: this.at + page, PageUp: this.at - page, Home: 0, End: last,
    };
    const to = moves[event.key];
    if (to !== undefined) {
      this.at = Math.max(0, Math.min(last, to));
      const top = this.at * this.height, view = this.grid.clientHeight - this.head.offsetHeight;
      if (top < this.grid.scrollTop) this.grid.scrollTop = top;
      else if (top + this.height > this.grid.scrollTop + view) this.grid.scrollTop = top + this.height - view;
      this.draw(true);
    } else if (event.key === " ") this.toggle(this.at);
    else if (event.key === "Enter" && this.shown[this.at] !== undefined) location.hash = `#/run/${this.shown[this.at]!.run}`;
    else return;
    event.preventDefault();
    event.stopPropagation();
  }

  private key(event: KeyboardEvent): boolean {
    if (["ArrowDown", "ArrowUp", "j", "k", "Enter"].includes(event.key) && !(event.target as HTMLElement).closest("a, button, select, input")) {
      this.body.focus({ preventScroll: true });
      this.press(event);
      return true;
    }
    const key = event.key.toLowerCase();
    if (key === "c" && chosen.length > 0) location.hash = link("curves", { runs: chosen.join(",") });
    else if (key === "d" && chosen.length > 1) location.hash = link("compare", { a: chosen[0], b: chosen[1] });
    else if (key === "a") this.chooseAll();
    else return false;
    return true;
  }

  private showBar(): void {
    this.bar.hidden = chosen.length === 0;
    if (chosen.length === 0) return;
    const found = looks(chosen.slice(0, 24)), names = chosen.slice(0, this.isNarrow ? 2 : 5);
    put(this.bar,
      h("span", { class: "who" }, h("b", {}, `${chosen.length} chosen`), ...names.map((run) => h("span", { class: "chip" }, found.has(run) && swatch(found.get(run)!), run)), chosen.length > names.length && h("span", { class: "quiet" }, `and ${chosen.length - names.length} more`)),
      h("span", { class: "space" }),
      h("a", { class: "button main", href: link("curves", { runs: chosen.slice(0, 24).join(",") }) }, "Curves"),
      chosen.length > 1 && h("a", { class: "button", href: link("compare", { a: chosen[0], b: chosen[1] }) }, "Compare"),
      h("a", { class: "button", href: link("samples", { runs: chosen.slice(0, 6).join(",") }) }, "Samples"),
      h("button", { type: "button", onclick: () => (choose([]), this.showHead()) }, "Clear"));
  }

  private toggleTree(button: HTMLElement): void {
    this.isTree = !this.isTree || this.sort !== "";
    this.sort = "";
    button.setAttribute("aria-pressed", String(this.isTree));
    this.remember();
    this.arrange();
  }

  private toggleGroups(button: HTMLElement): void {
    this.isGrouped = !this.isGrouped;
    button.setAttribute("aria-pressed", String(this.isGrouped));
    this.grid.scrollTop = 0;
    void this.load();
  }

  private clear(): void {
    this.filter.value = "";
    this.experiment.value = "";
    void this.load();
  }

  private async chooseColumns(): Promise<void> {
    const { config, metrics } = (await theLab(!isExport)).columns;
    const names = isExport ? Object.keys(this.rows[0]?.values ?? {}).map((name): [string, string] => [name, "in this copy"]) : [
      ...config.map((key): [string, string] => [key, "config"]),
      ...metrics.flatMap((name): [string, string][] => [[`last:${name}`, "metric"], [`min:${name}`, "metric"], [`max:${name}`, "metric"]]),
    ];
    const list = h("ul", { class: "picks" });
    const fill = (): void => {
      const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
      const fits = names.filter(([name]) => words.every((word) => name.toLowerCase().includes(word)));
      fits.sort((a, b) => Number(this.columns.includes(b[0])) - Number(this.columns.includes(a[0])));
      put(list, ...fits.slice(0, 200).map(([name, kind]) => h("li", {}, h("label", {}, h("input", {
        type: "checkbox", checked: this.columns.includes(name),
        onchange: (event: Event) => {
          const isOn = (event.target as HTMLInputElement).checked;
          this.columns = isOn ? [...this.columns, name] : this.columns.filter((one) => one !== name);
          void this.load();
        },
      }), h("span", {}, name), h("span", { class: "quiet" }, kind)))), fits.length === 0 && h("li", { class: "quiet" }, "No key or metric is called that."));
    };
    const search = h("input", { type: "search", placeholder: "Search config keys and metrics", "aria-label": "Search config keys and metrics", oninput: fill });
    fill();
    dialog("Columns", h("p", { class: "quiet" }, "Config keys; and the last, least or most value of any metric."), search, list);
    search.focus();
  }
}

export function status(word: string): HTMLElement {
  return h("span", { class: "status", "data-status": word }, word);
}

export function verdictMark(verdict: unknown): HTMLElement | false {
  const word = verdictWord(verdict);
  if (word === "") return false;
  const mark = word === "supported" ? "✓" : word === "refuted" ? "✗" : "?";
  return h("span", { class: "verdict-mark", "data-verdict": word, title: `hypothesis ${word}`, role: "img", "aria-label": `hypothesis ${word}` }, mark);
}

export function verdictWord(verdict: unknown): string {
  if (typeof verdict === "string") return verdict;
  return typeof (verdict as { word?: unknown } | null)?.word === "string" ? (verdict as { word: string }).word : "";
}

function spread(found: unknown): string {
  if (found === null || typeof found !== "object" || Array.isArray(found)) return value(found ?? "");
  const { mean, sd, n } = found as Spread;
  return `${short(mean)}${isNumber(sd) && n > 1 ? ` ± ${short(sd, 2)}` : ""}`;
}

/** The best eval's loss; else the last one that was logged. */
export function bestOf(row: Row): unknown {
  if (isNumber(row.best)) return row.best;
  const best = row.best as { loss?: unknown } | null;
  return isNumber(best?.loss) ? best?.loss : row.loss;
}

function changes(row: Row): HTMLElement {
  const changed = row.changed ?? [];
  const parts = changed.slice(0, 3).map(([key, a, b]) => h("span", { class: "change" }, h("span", { class: "quiet" }, tail(key)), " ", h("del", {}, value(a ?? "–")), " → ", h("b", {}, value(b ?? "–"))));
  const why = row.why || row.note || "";
  return h("span", { class: "changes" }, ...parts, changed.length > 3 && h("span", { class: "quiet" }, `+${changed.length - 3}`), why !== "" && h("span", { class: "why" }, why.split("\n")[0]));
}

function tail(key: string): string {
  return key.split(".").slice(-1)[0] ?? key;
}

function sortable(row: Row, name: string): unknown {
  switch (name) {
    case "run": return row.run;
    case "status": return row.status;
    case "loss": return bestOf(row);
    case "steps": return row.steps;
    case "changed": return row.changed?.length ?? 0;
    case "tags": return row.tags?.join(" ");
    case "wall_s": return row.wall_s;
    case "started": return instant(row.started)?.getTime();
    default: return row.values?.[name];
  }
}

/** Numbers before texts, what is absent or not finite last whatever the direction. */
function order(a: unknown, b: unknown, isDown: boolean): number {
  const rank = (x: unknown): number => (typeof x === "number" && Number.isFinite(x) ? 0 : typeof x === "string" && x !== "" && !isNumber(x) ? 1 : typeof x === "boolean" ? 1 : 2);
  if (rank(a) !== rank(b)) return rank(a) - rank(b);
  const by = rank(a) === 0 ? (a as number) - (b as number) : String(a ?? "").localeCompare(String(b ?? ""), "en", { numeric: true });
  return isDown ? -by : by;
}

/** In a copy there is nobody to ask: the rows are filtered here, by comparisons and /regex/. */
function here(rows: Row[], query: string, experiment: string): Row[] {
  let found = experiment === "" ? rows : rows.filter((row) => row.experiment === experiment);
  const regex = /^\/(.*)\/$/.exec(query);
  if (regex !== null) {
    const test = new RegExp(regex[1]!, "i");
    found = found.filter((row) => test.test([row.run, row.note, row.why, ...(row.tags ?? [])].join("\n")));
  } else if (query !== "") {
    const [, name = "", operator = "", wanted = ""] = /^\s*([\w.:/-]+)\s*(!=|<=|>=|=|<|>|~)\s*(.*?)\s*$/.exec(query) ?? [];
    if (name === "") throw new Refusal(`${query} is no filter; NAME=VALUE is, and /regex/`, "bad-filter", 400);
    found = found.filter((row) => {
      const values = { ...leaves(row.values), tag: row.tags?.join(" "), status: row.status, experiment: row.experiment, steps: row.steps, loss: bestOf(row) } as Record<string, unknown>;
      const x = values[name] ?? (row.values ?? {})[name];
      if (operator === "~") return new RegExp(wanted).test(String(x ?? ""));
      if (operator === "=") return String(x) === wanted || (isNumber(x) && num(x) === Number(wanted));
      if (operator === "!=") return String(x) !== wanted;
      if (!isNumber(x)) return false;
      return operator === "<" ? num(x) < +wanted : operator === "<=" ? num(x) <= +wanted : operator === ">" ? num(x) > +wanted : num(x) >= +wanted;
    });
  }
  return found;
}
