// The sampled responses: a list of prompts on one side, the responses to the chosen one on the other.

const solved = (response) => response.reward !== null && response.reward > 0.5;

/** Text with what was searched for marked. */
function marked(text, query) {
  if (!query) return [text];
  const parts = [], small = text.toLowerCase();
  let from = 0;
  // a letter may change its length in lower case; then nothing is marked, rather than the wrong place
  for (let at = small.length === text.length ? small.indexOf(query) : -1; at >= 0; at = small.indexOf(query, from)) {
    parts.push(text.slice(from, at), make("mark", {}, text.slice(at, at + query.length)));
    from = at + query.length;
  }
  return [...parts, text.slice(from)];
}

function browse(box, data) {
  const filter = { run: "", step: "", split: "", reward: "", level: "", query: "" };
  let groups = [], chosen = 0;

  const fits = (response, group) =>
    (!filter.reward || solved(response) === (filter.reward === "solved")) &&
    (!filter.query || [group.prompt, group.answer, response.text].some((text) => text.toLowerCase().includes(filter.query)));
  const matches = (group) =>
    ["run", "step", "split", "level"].every((key) => filter[key] === "" || String(group[key]) === filter[key]) &&
    group.responses.some((response) => fits(response, group));

  function select(key, label, options) {
    if (options.length < 2) return null;
    const change = (event) => { filter[key] = event.target.value; list(); };
    const choices = options.map(([value, text]) => make("option", { value }, text));
    return make("label", {}, label, make("select", { name: key, onchange: change }, make("option", { value: "" }, "all"), choices));
  }
  const distinct = (key) => [...new Set(data.samples.map((group) => group[key]))].filter((v) => v !== null)
    .sort((a, b) => (typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b)))).map((v) => [String(v), String(v)]);

  const search = make("input", { type: "search", name: "query", placeholder: "text of a prompt or response", oninput: (event) => { filter.query = event.target.value.toLowerCase(); list(); } });
  const filters = make("div", { class: "filters" },
    select("run", "run", data.runs.map((run, r) => [String(r), run.name]).filter(([r]) => data.samples.some((g) => String(g.run) === r))),
    select("step", "step", distinct("step")), select("split", "split", distinct("split")),
    select("reward", "reward", [["solved", "solved"], ["unsolved", "unsolved"]]), select("level", "level", distinct("level")),
    make("label", { class: "search" }, "search", search));
  const count = make("p", { class: "count", role: "status" });
  const names = make("div", { class: "list", role: "listbox", tabindex: 0, "aria-label": "Prompts" });
  const detail = make("div", { class: "detail" });
  box.append(filters, count, make("div", { class: "split" }, names, detail));

  function list() {
    groups = data.samples.filter(matches);
    const responses = groups.reduce((n, group) => n + group.responses.filter((r) => fits(r, group)).length, 0);
    count.textContent = groups.length ? `${responses} response${responses === 1 ? "" : "s"} to ${groups.length} prompt${groups.length === 1 ? "" : "s"}` : "No response fits.";
    names.replaceChildren(...groups.map((group, i) => make("div", { class: "item", role: "option", id: `item-${i}`, onclick: () => choose(i) },
      make("span", { class: "where" }, `${data.runs.length > 1 ? `${data.runs[group.run].name} · ` : ""}step ${group.step} · ${group.split}${group.level === null ? "" : ` · level ${group.level}`}`),
      make("span", { class: "first" }, group.prompt.trim().slice(0, 120)), dots(group))));
    choose(0);
  }

  const dots = (group) => {
    const right = group.responses.filter(solved).length;
    return make("span", { class: "dots", role: "img", "aria-label": `${right} of ${group.responses.length} solved` },
      group.responses.slice(0, 32).map((r) => make("i", { class: solved(r) ? "right" : "wrong" })));
  };

  function choose(i) {
    chosen = Math.min(Math.max(i, 0), groups.length - 1);
    [...names.children].forEach((item, k) => item.setAttribute("aria-selected", String(k === chosen)));
    const item = names.children[chosen];
    if (!item) { names.removeAttribute("aria-activedescendant"); detail.replaceChildren(); return; }
    names.setAttribute("aria-activedescendant", item.id);
    if (item.offsetTop < names.scrollTop) names.scrollTop = item.offsetTop;
    if (item.offsetTop + item.offsetHeight > names.scrollTop + names.clientHeight) names.scrollTop = item.offsetTop + item.offsetHeight - names.clientHeight;
    show(groups[chosen]);
  }

  function show(group) {
    const turn = (by, text, label) => make("button", { type: "button", class: "turn", "aria-label": label, disabled: !groups[chosen + by], onclick: () => {
      choose(chosen + by);
      const again = detail.querySelector(`[aria-label="${label}"]`);
      if (!again.disabled) again.focus();
    } }, text);
    const where = [data.runs.length > 1 ? data.runs[group.run].name : null, `step ${group.step}`, group.split, `group ${group.group}`, group.level === null ? null : `level ${group.level}`];
    const right = group.responses.filter(solved).length;
    detail.replaceChildren(
      make("div", { class: "pager" }, turn(-1, "←", "Previous prompt"), make("span", {}, `${chosen + 1} of ${groups.length}`), turn(1, "→", "Next prompt"),
        make("span", { class: "where" }, where.filter(Boolean).join(" · "))),
      make("h4", {}, "Prompt"), make("pre", { class: "prompt" }, marked(group.prompt, filter.query)),
      make("p", { class: "answer" }, "Answer ", make("code", {}, marked(group.answer, filter.query)), ` · ${right} of ${group.responses.length} solved`),
      ...group.responses.map((response) => answer(response, group)));
  }

  function answer(response, group) {
    const facts = [
      response.advantage === null ? null : `advantage ${response.advantage > 0 ? "+" : response.advantage < 0 ? "−" : ""}${digits(Math.abs(response.advantage))}`,
      response.length === null ? null : `${response.length} token${response.length === 1 ? "" : "s"}`,
    ];
    const reward = response.reward === null ? "no reward" : `reward ${response.reward < 0 ? "−" : ""}${digits(Math.abs(response.reward))}`;
    return make("article", { class: `response${fits(response, group) ? "" : " other"}` },
      make("p", { class: "facts" }, make("span", { class: solved(response) ? "right" : "wrong" }, reward), ...facts.filter(Boolean).map((text) => make("span", {}, text)),
        make("span", response.finished ? {} : { class: "cut" }, response.finished ? "finished" : "cut off")),
      make("pre", {}, response.text === "" ? make("em", {}, "empty") : marked(response.text, filter.query)));
  }

  box.addEventListener("keydown", (event) => {
    if (event.target.closest("input, select") || event.ctrlKey || event.metaKey || event.altKey) return;
    const to = { ArrowUp: chosen - 1, ArrowLeft: chosen - 1, ArrowDown: chosen + 1, ArrowRight: chosen + 1, Home: 0, End: groups.length - 1 }[event.key];
    if (to === undefined || !groups.length) return;
    event.preventDefault();
    choose(to);
  });
  list();
}
