// Notes are Markdown by people: a small part of it, made into elements. Nothing in a note becomes markup of this page.

import { h } from "./dom";

/** Headings, lists, quotes, code, rules; and in a line: bold, italics, code, links to http(s) and to runs. */
export function markdown(text: string): HTMLElement {
  const made = h("div", { class: "markdown" });
  const lines = text.replaceAll("\r\n", "\n").split("\n");
  let i = 0;
  while (i < lines.length) {
    const line = lines[i]!;
    if (line.trim() === "") {
      i += 1;
      continue;
    }
    if (line.startsWith("```")) {
      const held: string[] = [];
      for (i += 1; i < lines.length && !lines[i]!.startsWith("```"); i += 1) held.push(lines[i]!);
      i += 1;
      made.append(h("pre", { tabindex: 0 }, h("code", {}, held.join("\n"))));
      continue;
    }
    const heading = /^(#{1,4})\s+(.*)$/.exec(line);
    if (heading !== null) {
      made.append(h("h4", {}, ...inline(heading[2]!)));
      i += 1;
      continue;
    }
    if (/^(-{3,}|\*{3,})\s*$/.test(line)) {
      made.append(h("hr"));
      i += 1;
      continue;
    }
    const item = /^\s*([-*]|\d+\.)\s+/;
    if (item.test(line)) {
      const list = h(/^\s*\d/.test(line) ? "ol" : "ul");
      for (; i < lines.length && item.test(lines[i]!); i += 1) list.append(h("li", {}, ...inline(lines[i]!.replace(item, ""))));
      made.append(list);
      continue;
    }
    if (line.startsWith(">")) {
      const held: string[] = [];
      for (; i < lines.length && lines[i]!.startsWith(">"); i += 1) held.push(lines[i]!.replace(/^>\s?/, ""));
      made.append(h("blockquote", {}, ...inline(held.join("\n"))));
      continue;
    }
    const held: string[] = [];
    for (; i < lines.length && lines[i]!.trim() !== "" && !/^(```|#{1,4}\s|>|\s*([-*]|\d+\.)\s)/.test(lines[i]!); i += 1) held.push(lines[i]!);
    if (held.length === 0) held.push(lines[i++]!);
    made.append(h("p", {}, ...inline(held.join("\n"))));
  }
  return made;
}

const MARKS = /(`[^`]+`)|(\*\*[^*]+\*\*)|(\*[^*\s][^*]*\*|\b_[^_\s][^_]*_\b)|(\[[^\]]+\]\([^)\s]+\))|(https?:\/\/[^\s<>()]+)|(\n)/g;

function inline(text: string): (Node | string)[] {
  const out: (Node | string)[] = [];
  let at = 0;
  for (const found of text.matchAll(MARKS)) {
    const mark = found[0];
    out.push(text.slice(at, found.index));
    at = found.index + mark.length;
    if (found[1]) out.push(h("code", {}, mark.slice(1, -1)));
    else if (found[2]) out.push(h("strong", {}, ...inline(mark.slice(2, -2))));
    else if (found[3]) out.push(h("em", {}, ...inline(mark.slice(1, -1))));
    else if (found[4]) {
      const [, label, target] = /^\[([^\]]+)\]\(([^)\s]+)\)$/.exec(mark)!;
      out.push(link(target!, label!) ?? mark);
    } else if (found[5]) out.push(link(mark, mark) ?? mark);
    else out.push(h("br"));
  }
  out.push(text.slice(at));
  return out.filter((one) => one !== "");
}

function link(target: string, label: string): Node | null {
  if (/^[\w.-]+\/\d+$/.test(target)) return h("a", { href: `#/run/${target}` }, label);
  if (!/^https?:\/\//i.test(target)) return null; // no javascript:, no data:
  return h("a", { href: target, rel: "noreferrer noopener", target: "_blank" }, label);
}
