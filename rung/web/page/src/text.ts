// The page of a text model: a prompt goes in, tokens come out, each with what else it could have been.

import { h, put } from "./lab/dom";
import { ask, find, randomSeed, report, type Run, runs, SEED, Settings, showMessage, startShell } from "./shell";

interface About {
  context_size: number;
  vocab_size: number;
  most_tokens: number;
  has_chat: boolean;
  examples: string[];
  usual: { temperature: number; top_k: number; top_p: number; num_tokens: number };
}

interface Token {
  id: number;
  token: string;
  text: string;
  logprob: number;
  alternatives: [id: number, name: string, logprob: number, bytes: number[] | null][];
}

type Piece = Token | { prompt_tokens: number; seen_tokens: number } | { text: string; finish: "stop" | "length" };

const ALTERNATIVES = 10;
const KEPT = 40; // prompts
const PAUSE_MS = 500; // of typing, after which a live text goes on
const STORE = "rung-prompts";

startShell(
  [
    ["Ctrl Enter", "continue the prompt"],
    ["Esc", "stop"],
    ["← →", "from token to token"],
    ["Enter", "on a token: to its alternatives; on one of those: go on from there"],
    ["?", "this list"],
  ],
  "Probabilities are the model's own, before temperature, top-k and top-p.",
);

const prompt = find<HTMLTextAreaElement>("prompt");
const live = find<HTMLInputElement>("live");
const list = find<HTMLSelectElement>("prompts");
let stopping: AbortController | null = null;
let models: Run<About>[] = [];
let settings: Settings;
let columns: Column[] = [];

/** The answer of one run. */
class Column {
  tokens: Token[] = [];
  text = ""; // the prompt that these continue
  private signal: AbortSignal | null = null; // of the latest request
  private readonly words = h("div", { class: "words", role: "group", "aria-label": "The text, token by token" });
  private readonly note = h("p", { class: "note" });
  readonly element: HTMLElement;

  constructor(private readonly number: number, title: string) {
    this.element = h("section", { class: "card answer", "aria-label": title }, h("h2", {}, title), this.words, this.note);
    const at = (event: Event): HTMLElement | null => (event.target as HTMLElement).closest<HTMLElement>("[data-at]");
    for (const name of ["pointerover", "focusin", "click"]) {
      this.words.addEventListener(name, (event) => {
        const word = at(event);
        if (word !== null) this.point(word);
      });
    }
    this.words.addEventListener("keydown", (event) => {
      const word = at(event);
      if (word === null) return;
      const next = { ArrowRight: word.nextElementSibling, ArrowLeft: word.previousElementSibling }[event.key];
      if (next instanceof HTMLElement && next.dataset["at"] !== undefined) next.focus();
      else if (event.key === "Enter") find("alternatives").querySelector("button")?.focus();
      else return;
      event.preventDefault();
    });
  }

  /** Continues the prompt, after the first `num` tokens of before and then `instead`. */
  async go(text: string, request: object, signal: AbortSignal, num = 0, instead: Token | null = null): Promise<void> {
    this.text = text;
    this.signal = signal;
    this.tokens = this.tokens.slice(0, num);
    put(this.words, h("span", { class: "given" }, text), ...this.tokens.map((token, index) => this.word(token, index)));
    if (instead !== null) this.add(instead);
    this.element.dataset["state"] = "busy";
    const then = this.tokens.map((token) => token.id), begun = performance.now();
    let made = 0, seen = "";
    try {
      await ask<Piece>(this.number, { ...request, prompt: text, then }, (piece) => {
        if ("finish" in piece) {
          if (piece.text !== "") this.words.append(piece.text);
          const ending = piece.finish === "stop" ? ", then the end of the document" : "";
          this.note.textContent = `${counted(made)}${ending}, ${rate(made, begun)}${seen}`;
        } else if ("prompt_tokens" in piece) {
          if (piece.seen_tokens < piece.prompt_tokens) seen = `; of the prompt the model sees the last ${piece.seen_tokens} of ${piece.prompt_tokens} tokens`;
        } else {
          made += 1;
          this.add(piece);
          this.note.textContent = `${counted(made)}, ${rate(made, begun)}${seen}`;
        }
      }, signal);
    } catch (problem) {
      if (this.signal === signal) this.note.textContent = `${counted(made)}, stopped`;
      throw problem;
    } finally {
      if (this.signal === signal) this.element.dataset["state"] = "done";
    }
  }

  private add(token: Token): void {
    this.tokens.push(token);
    this.words.append(this.word(token, this.tokens.length - 1));
  }

  private word(token: Token, index: number): HTMLElement {
    const word = h("span", { class: "token", "data-at": index, tabindex: index === 0 ? 0 : -1 }, token.text);
    if (token.text.includes("\n")) word.dataset["line"] = "";
    word.style.setProperty("--doubt", (1 - Math.exp(token.logprob)).toFixed(3));
    return word;
  }

  private point(word: HTMLElement): void {
    const index = Number(word.dataset["at"]), token = this.tokens[index];
    if (token === undefined || word.dataset["here"] !== undefined) return;
    for (const other of document.querySelectorAll("[data-here]")) delete (other as HTMLElement).dataset["here"];
    word.dataset["here"] = "";
    for (const other of this.words.querySelectorAll<HTMLElement>("[tabindex='0']")) other.tabIndex = -1;
    word.tabIndex = 0;
    find("token-note").textContent = `${quoted(token.token)} had ${percent(token.logprob)}. Choose another to go on from there.`;
    find("token").dataset["is"] = "on";
    put(find("alternatives"), token.alternatives.map(([id, name, logprob]) => {
      const instead: Token = { ...token, id, token: name, text: id === token.id ? token.text : name, logprob };
      const button = h("button", { type: "button", onclick: () => start(this, index, instead), "aria-pressed": id === token.id },
        h("span", { class: "name" }, quoted(name)), h("span", { class: "share" }, h("i", {})), h("output", {}, percent(logprob)));
      button.querySelector("i")!.style.width = `${(100 * Math.exp(logprob)).toFixed(2)}%`;
      return h("li", {}, button);
    }));
  }
}

function counted(made: number): string {
  return made === 1 ? "1 token" : `${made} tokens`;
}

function rate(made: number, begun: number): string {
  return `${(made / Math.max(1e-3, (performance.now() - begun) / 1000)).toFixed(1)} tokens/s`;
}

function percent(logprob: number): string {
  const share = 100 * Math.exp(logprob);
  return `${share >= 10 ? share.toFixed(1) : share >= 0.01 ? share.toFixed(2) : "<0.01"} %`;
}

function quoted(text: string): string {
  return text.replaceAll("\n", "⏎").replaceAll("\t", "⇥").replaceAll(" ", "␣");
}

/** All runs continue the prompt, or one goes on from a token of its text. */
function start(column: Column | null = null, num = 0, instead: Token | null = null): void {
  if (!settings.isValid) return;
  stop();
  const mine = (stopping = new AbortController());
  if (column === null && find<HTMLInputElement>("fresh").checked) settings.set("seed", randomSeed());
  const request = { ...settings.values, alternatives: ALTERNATIVES };
  if (column === null && prompt.value.trim() !== "" && !live.checked) keep(prompt.value);
  find("stop").removeAttribute("disabled");
  void report(async () => {
    try {
      const work = column === null
        ? columns.map((one) => one.go(prompt.value, request, mine.signal))
        : [column.go(column.text, request, mine.signal, num, instead)];
      const failed = (await Promise.allSettled(work)).find((one) => one.status === "rejected");
      if (failed !== undefined && stopping === mine) throw failed.reason;
    } finally {
      if (stopping === mine) find("stop").setAttribute("disabled", "");
    }
  });
}

// Prompts, kept in this browser

function kept(): string[] {
  try {
    const found: unknown = JSON.parse(localStorage.getItem(STORE) ?? "[]");
    return Array.isArray(found) ? found.filter((one) => typeof one === "string") : [];
  } catch {
    return [];
  }
}

function keep(text: string): void {
  store([text, ...kept().filter((one) => one !== text)].slice(0, KEPT));
}

function store(texts: string[]): void {
  try {
    localStorage.setItem(STORE, JSON.stringify(texts));
  } catch {
    // a browser that keeps nothing
  }
  showPrompts();
}

function showPrompts(): void {
  const group = (label: string, texts: string[]): HTMLElement | false =>
    texts.length > 0 && h("optgroup", { label }, texts.map((text) => h("option", { value: text }, text.trim().replace(/\s+/g, " ").slice(0, 60))));
  put(list, h("option", { value: "" }, "choose"), group("Yours, kept in this browser", kept()), group("Held-out documents", models[0]?.about.examples ?? []));
}

list.addEventListener("change", () => {
  if (list.value === "") return;
  prompt.value = list.value;
  prompt.focus();
});
find("forget").addEventListener("click", () => store(kept().filter((one) => one !== prompt.value)));
addEventListener("pointerdown", (event) => {
  if ((event.target as Element).closest("#token, .token") === null) delete find("token").dataset["is"]; // on a phone it lies over the page
});
find("go").addEventListener("click", () => start());
find("stop").addEventListener("click", stop);
let typing = 0;
prompt.addEventListener("input", () => {
  clearTimeout(typing);
  if (live.checked) typing = window.setTimeout(() => start(), PAUSE_MS);
});
addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) start();
  else if (event.key === "Escape") stop();
});

/** Also what was to begin after a pause of typing. */
function stop(): void {
  clearTimeout(typing);
  stopping?.abort();
}

models = await runs<About>();
const { usual, most_tokens } = models[0]!.about;
settings = new Settings(find("fields"), [
  { name: "temperature", label: "Temperature", value: usual.temperature, min: 0, max: 10, step: 0.05, note: "0 takes the likeliest token each time" },
  { name: "top_k", label: "Top-k", value: usual.top_k, min: 0, max: 1e6, step: 1, note: "Choose among the k likeliest; 0 = all" },
  { name: "top_p", label: "Top-p", value: usual.top_p, min: 0.01, max: 1, step: 0.01, note: "Choose among the likeliest of this joint probability" },
  { name: "num_tokens", label: "Tokens", value: usual.num_tokens, min: 1, max: most_tokens, step: 1 },
  SEED,
]);
columns = models.map((run, number) => new Column(number, run.title));
put(find("answers"), columns.map((column) => column.element));
find("answers").style.setProperty("--columns", String(columns.length));
showPrompts();
prompt.value ||= models[0]!.about.examples[0] ?? "";
prompt.focus();
showMessage("");
