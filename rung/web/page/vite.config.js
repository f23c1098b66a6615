import { readFileSync } from "node:fs";

const PLAY = ["text", "piano", "music", "speech", "world"]; // one page for each kind of player

// The pages of `rung play` have one header.
const header = {
  name: "header",
  transformIndexHtml: {
    order: "pre",
    handler: (html) => html.replace("<!-- header -->", () => readFileSync("src/header.html", "utf8").trim()),
  },
};

// The pages are served from any address, so their own links are relative; what is built goes beside the Python that serves it.
export default {
  base: "./",
  plugins: [header],
  build: {
    outDir: "../static",
    emptyOutDir: true,
    assetsInlineLimit: 0, // nothing inline: the pages are served with a strict content security policy
    modulePreload: { polyfill: false },
    reportCompressedSize: false,
    rollupOptions: { input: Object.fromEntries([...PLAY, "lab"].map((name) => [name, `${name}.html`])) },
  },
};
