// The page is served from any address, so its own links are relative; what is built goes beside the Python that serves it.
export default {
  base: "./",
  build: {
    outDir: "../static",
    emptyOutDir: true,
    assetsInlineLimit: 0, // nothing inline: the page is served with a strict content security policy
    modulePreload: { polyfill: false },
    reportCompressedSize: false,
  },
};
