/* All runs of a folder. */

import { address, el, get, register } from "./common.js";

register("runs", "All runs", {
  async show(container) {
    const { runs } = await get("/api/runs");
    container.append(el("ul", {}, runs.map((run) => el("li", {}, el("a", { href: address(run.key, "overview") }, run.name)))));
  },
});
