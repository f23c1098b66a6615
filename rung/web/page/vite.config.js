// The pages are served from any address, so their own links are relative; what is built goes beside the Python that serves it.
export default {
  base: "./",
  build: {
    outDir: "../static",
    emptyOutDir: true,
    assetsInlineLimit: 0, // nothing inline: the pages are served with a strict content security policy
    modulePreload: { polyfill: false },
    reportCompressedSize: false,
    rollupOptions: { input: { index: "index.html", lab: "lab.html" } }, // the play page; the lab book
  },
};
