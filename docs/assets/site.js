// Formulas (KaTeX) and diagrams (Mermaid), both from assets/vendor: nothing is fetched from another host.
(function () {
  "use strict";
  const base = new URL(".", document.currentScript.src);

  function drawFormulas() {
    document.querySelectorAll(".arithmatex").forEach(function (node) {
      renderMathInElement(node, {
        delimiters: [
          { left: "\\(", right: "\\)", display: false },
          { left: "\\[", right: "\\]", display: true },
        ],
        throwOnError: false,
      });
    });
  }

  function loadMermaid() {
    return new Promise(function (resolve, reject) {
      const script = document.createElement("script");
      script.src = new URL("vendor/mermaid/mermaid.min.js", base).href;
      script.onload = resolve;
      script.onerror = function () { reject(new Error("cannot load " + script.src)); };
      document.head.appendChild(script);
    });
  }

  async function drawDiagrams(nodes) {
    const dark = document.body.getAttribute("data-md-color-scheme") === "slate";
    mermaid.initialize({
      startOnLoad: false,
      securityLevel: "strict",
      theme: dark ? "dark" : "neutral",
      fontFamily: getComputedStyle(document.body).fontFamily,
    });
    for (let i = 0; i < nodes.length; i++) {
      const result = await mermaid.render("diagram-" + i, nodes[i].dataset.source);
      nodes[i].innerHTML = result.svg;
    }
  }

  drawFormulas();

  const nodes = Array.from(document.querySelectorAll("div.diagram"));
  if (nodes.length === 0) return; // the library is large: only pages with a diagram load it
  nodes.forEach(function (node) { node.dataset.source = node.textContent; });
  let queue = loadMermaid().then(function () { return drawDiagrams(nodes); });
  new MutationObserver(function () {
    queue = queue.then(function () { return drawDiagrams(nodes); });
  }).observe(document.body, { attributes: true, attributeFilter: ["data-md-color-scheme"] });
})();
