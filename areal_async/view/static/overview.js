/* What a run does now, and how it has gone. */

import { Board } from "./board.js";
import { el, get, plotly, register } from "./common.js";
import { drawNow } from "./now.js";
import { runData } from "./store.js";

let page = null;

/** What is open in the page stays as it was. */
function draw() {
  const { data, now, board } = page;
  const told = JSON.stringify([data.latest.run, data.latest.waits, data.latest.balance, data.latest.troubles.length, data.latest.problems, data.next, board?.eta]);
  if (told === page.told) return; // nothing is new: whoever marks or reads something isn't disturbed
  page.told = told;
  drawNow(now, data, board?.eta ?? null);
}

register("overview", "Overview", {
  async show(container, run, params) {
    plotly().catch(() => {}); // so that it is there when the first figure wants it, and its error is told then
    const asked = get("/api/figures");
    const data = await runData(run).update();
    const now = el("div", { class: "now" });
    const figures = el("div");
    page = { data, now, board: null, rows: data.next, told: "" };
    now.addEventListener("again", () => {
      page.told = "";
      draw();
    });
    container.append(now, figures);
    draw();
    const mine = page;
    const list = await asked;
    if (page !== mine) return;
    page.board = new Board(figures, list, [data], params);
    page.board.onEta = draw;
  },

  refresh() {
    if (!page) return;
    draw();
    const { data, board } = page;
    const told = `${data.next} ${data.latest.branch} ${data.latest.evaluations.length} ${data.latest.reading.events}`;
    if (board && told !== page.drawn) board.update();
    page.drawn = told;
  },

  hide() {
    page?.board?.close();
    page = null;
  },
});
