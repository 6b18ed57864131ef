"use strict";
// Draws the curves in #curves, and keeps a page up to date while a run writes. Works without: tables and episodes are HTML.
(() => {
  const COLOURS = ["#1d85c4", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#777777"];  // told apart by the colour-blind too
  const holder = document.getElementById("charts");
  const source = document.getElementById("curves");
  const style = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  let plots = [];

  // One x axis for all runs and evaluations of a chart: the union of their steps.
  function tableOf(chart, runs) {
    const lines = [];
    runs.forEach((run, place) => {
      chart.names.forEach((name, nth) => {
        for (const part of [run, run.evaluations]) {
          if (!part || !part.series[name]) continue;
          const label = runs.length > 1 || !name ? [run.label, name].filter(Boolean).join(": ") : name;
          const colour = run.colour || COLOURS[(runs.length > 1 ? place : nth) % COLOURS.length];
          const dash = runs.length > 1 && nth ? [4 * nth, 4] : [];
          lines.push({ label, colour, dash, steps: part.steps, values: part.series[name], band: part.bands[name], dots: part !== run });
        }
      });
    });
    const steps = [...new Set(lines.flatMap((line) => line.steps))].sort((a, b) => a - b);
    const placed = (line, values) => {
      const at = new Map(line.steps.map((step, n) => [step, values[n]]));
      return steps.map((step) => (at.has(step) ? at.get(step) : undefined));
    };
    const data = [steps], series = [{ label: chart.x || "step" }], bands = [];
    for (const line of lines) {
      data.push(placed(line, line.values));
      series.push({ label: line.label, stroke: line.colour, dash: line.dash, width: 1.5, spanGaps: true,
        points: { show: line.dots || line.steps.length < 3 ? true : undefined } });
      if (line.band && line.band[0]) {
        const first = data.length;
        for (const edge of [1, 0]) {
          data.push(placed(line, line.band[edge]));
          series.push({ label: `${line.label}, 95 % ${edge ? "high" : "low"}`, class: "band", stroke: "transparent", width: 0, spanGaps: true, points: { show: false } });
        }
        bands.push({ series: [first, first + 1], fill: `${line.colour}2b` });
      }
    }
    return { data, series, bands };
  }

  // What is 0 throughout has an axis up to 1; uPlot's own would go to 100.
  function range(plot, low, high) {
    if (low === null) return [null, null];
    return low === 0 && high === 0 ? [0, 1] : uPlot.rangeNum(low, high, 0.1, true);
  }

  function draw(found) {
    plots.forEach((plot) => plot.destroy());
    plots = [];
    holder.replaceChildren();
    for (const chart of found.charts) {
      const figure = document.createElement("figure");
      const caption = document.createElement("figcaption");
      caption.textContent = chart.title;
      figure.append(caption);
      holder.append(figure);
      const { data, series, bands } = tableOf(chart, chart.runs || found.runs);
      const last = series.slice(1).filter((one) => !one.label.includes("95 %")).map((one) => {
        const values = data[series.indexOf(one)].filter((value) => value != null);
        return `${one.label} ${values.length ? Number(values[values.length - 1].toPrecision(4)) : "none"}`;
      });
      figure.setAttribute("role", "img");
      figure.setAttribute("aria-label", `${chart.title}, newest values: ${last.join("; ")}`);
      const axis = { stroke: style("--soft"), grid: { stroke: style("--line"), width: 1 }, ticks: { stroke: style("--line") } };
      plots.push(new uPlot({
        width: Math.max(figure.clientWidth - 26, 200), height: 210, series, bands,
        axes: [axis, { ...axis, size: 56 }], scales: { x: { time: false }, y: { range } }, cursor: { sync: { key: chart.x || "step" } },
      }, data, figure));
    }
  }

  if (holder && source && window.uPlot) {
    const found = JSON.parse(source.textContent);
    draw(found);
    let wide = innerWidth;
    addEventListener("resize", () => { if (innerWidth !== wide) { wide = innerWidth; draw(window.spearCurves || found); } });
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => draw(window.spearCurves || found));
  }

  const names = new URLSearchParams(location.search).getAll("run");
  const live = document.querySelector("[data-live]");
  const news = document.getElementById("news");
  if (!news || !(holder || live)) return;  // a report has no news
  let known = null;
  async function look() {
    try {
      const query = new URLSearchParams(names.map((name) => ["run", name]));
      const state = await (await fetch(`/data/state?${query}`)).text();
      if (known !== null && state !== known && document.visibilityState === "visible") {
        if (holder) {
          const found = await (await fetch(`/data/curves?${query}`)).json();
          window.spearCurves = found;
          draw(found);
          for (const run of found.runs) {
            for (const place of document.querySelectorAll("[data-step]")) {
              if (place.dataset.step === run.name) place.textContent = run.step;
            }
          }
          news.textContent = found.runs.map((run) => `${run.label} is at step ${run.step}`).join(", ");
        } else if (!live.contains(document.activeElement)) {
          const page = new DOMParser().parseFromString(await (await fetch(location.href)).text(), "text/html");
          const fresh = page.querySelector("[data-live]");
          if (fresh) { live.replaceChildren(...fresh.childNodes); news.textContent = "New steps have arrived."; }
        }
        known = state;
      } else if (known === null) {
        known = state;
      }
      if (news.dataset.lost) { news.textContent = ""; delete news.dataset.lost; }
    } catch {
      news.textContent = "The server does not answer."; news.dataset.lost = "1";
    }
    setTimeout(look, 1500);
  }
  look();
})();
