// The timeline: the operations of all ranks over time, drawn on a canvas. Buttons, keys, wheel and fingers zoom and move.
"use strict";
if (document.getElementById("timeline-data") !== null) {
  const data = JSON.parse(document.getElementById("timeline-data").textContent);
  const canvas = document.getElementById("timeline-canvas");
  const scroller = canvas.parentElement;
  const shown = document.getElementById("timeline-shown");
  const picked = document.getElementById("timeline-picked");
  const list = document.getElementById("timeline-list");
  const windows = document.getElementById("timeline-windows");
  // The numbers of one operation in `operations`; the first is its begin.
  const STRIDE = data.fields.length;
  const [LASTED, LANE, OPERATION, BYTES, SEQUENCE, GROUP, ALGORITHM, WIRE, QUEUED, ERROR, SUBMITTED] =
    ["lasted", "lane", "operation", "bytes", "sequence", "group", "algorithm", "wire", "queued", "error", "submitted"]
      .map((field) => data.fields.indexOf(field));
  const COLOURS = 8;
  const AXIS = 24, LABEL = 18, COMPUTING = 6, GAP = 10;
  const MOST_PIXELS = 16000; // height of a canvas: browsers do not draw a larger one
  const MOST_LISTED = 500;
  const transfers = new Set(data.transfers);
  const SLACK = 4; // pixels beside an operation in which a click still chooses it

  let windowNow = data.windows[0];
  let from = 0, to = windowNow.length;
  let places = []; // for each rank: top, height of a lane
  let chosen = null; // { rank, at }: an operation: its rank, and the place of its numbers
  let isScheduled = false;

  const time = (ns) => {
    const size = Math.abs(ns);
    const [unit, name] = size >= 1e9 ? [1e9, "s"] : size >= 1e6 ? [1e6, "ms"] : size >= 1e3 ? [1e3, "us"] : [1, "ns"];
    return `${Number((ns / unit).toPrecision(4))} ${name}`;
  };
  const bytes = (count) => {
    let unit = 0;
    while (count >= 1024 && unit < 4) { count /= 1024; unit += 1; }
    return `${Number(count.toPrecision(4))} ${["B", "KB", "MB", "GB", "TB"][unit]}`;
  };
  const name = (what, rank, at, field) => data.names[what][rank.operations[at + field]] ?? "?";
  const end = (rank, at) => rank.operations[at] + rank.operations[at + LASTED];

  const describe = (rank, at) => {
    const numbers = rank.operations;
    const failed = numbers[at + ERROR] >= 0 ? `, failed: ${name("error", rank, at, ERROR)}` : "";
    const when = numbers[at + SUBMITTED]
      ? `submitted at ${time(numbers[at])}, its duration on the device is not known; `
      : `${time(numbers[at + LASTED])} from ${time(numbers[at])} on, queued ${time(numbers[at + QUEUED])} before; `;
    return `rank ${rank.rank}: ${name("operation", rank, at, OPERATION)} of ${bytes(numbers[at + BYTES])}, ${when}` +
      `number ${numbers[at + SEQUENCE]} of ${name("group", rank, at, GROUP)}; ` +
      `algorithm ${name("algorithm", rank, at, ALGORITHM)}, wire ${name("wire", rank, at, WIRE)}${failed}`;
  };

  // The same call on every rank if it is known: [rank, at], in order of begin.
  const call = (rank, at) => {
    const numbers = rank.operations;
    if (transfers.has(name("operation", rank, at, OPERATION))) return [[rank, at]];
    const found = [];
    for (const other of windowNow.ranks) {
      for (let there = 0; there < other.operations.length; there += STRIDE) {
        const same = [OPERATION, SEQUENCE, GROUP].every((field) => other.operations[there + field] === numbers[at + field]);
        if (same) found.push([other, there]);
      }
    }
    if (new Set(found.map(([other]) => other)).size < found.length) return [[rank, at]];
    return found.sort((a, b) => a[0].operations[a[1]] - b[0].operations[b[1]]);
  };

  const arrange = () => {
    let top = AXIS;
    places = windowNow.ranks.map((rank) => {
      const lane = Math.max(3, Math.min(14, Math.floor(84 / Math.max(1, rank.lanes))));
      const place = { top, lane };
      top += LABEL + Math.max(1, rank.lanes) * lane + COMPUTING + GAP;
      return place;
    });
    canvas.style.height = `${top}px`;
    const ratio = Math.min(window.devicePixelRatio || 1, MOST_PIXELS / top);
    canvas.width = Math.max(1, Math.round(canvas.clientWidth * ratio));
    canvas.height = Math.round(top * ratio);
    const context = canvas.getContext("2d");
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
  };

  const ticks = () => {
    const least = (to - from) / Math.max(2, canvas.clientWidth / 110);
    const power = 10 ** Math.floor(Math.log10(least));
    const step = Math.max(1, [1, 2, 5, 10].map((factor) => factor * power).find((each) => each >= least));
    const found = [];
    for (let at = Math.ceil(from / step) * step; at <= to; at += step) found.push(at);
    return found;
  };

  const draw = () => {
    isScheduled = false;
    const context = canvas.getContext("2d");
    const style = getComputedStyle(document.documentElement);
    const ink = (variable) => style.getPropertyValue(variable).trim();
    const width = canvas.clientWidth, height = canvas.clientHeight;
    const scale = width / (to - from);
    const x = (at) => (at - from) * scale;
    context.clearRect(0, 0, width, height);
    context.font = "12px system-ui, 'Noto Sans', 'DejaVu Sans', sans-serif";
    context.textBaseline = "middle";

    for (const at of ticks()) {
      context.fillStyle = ink("--line");
      context.fillRect(Math.round(x(at)), AXIS - 6, 1, height);
      context.fillStyle = ink("--quiet");
      const text = time(at);
      context.fillText(text, Math.min(x(at) + 3, width - context.measureText(text).width), AXIS / 2 - 1);
    }

    const colours = Array.from({ length: COLOURS }, (_, index) => ink(`--series-${index}`));
    let inView = 0;
    windowNow.ranks.forEach((rank, index) => {
      const { top, lane } = places[index];
      const numbers = rank.operations;
      const lanesTop = top + LABEL, below = lanesTop + Math.max(1, rank.lanes) * lane;
      for (let step = 0; step < rank.steps.length; step += 3) {
        const begin = x(rank.steps[step + 1]), finish = x(rank.steps[step + 2]);
        if (finish < 0 || begin > width) continue;
        context.fillStyle = ink(rank.steps[step] % 2 ? "--band" : "--band-other");
        context.fillRect(begin, lanesTop - 1, finish - begin, below - lanesTop + COMPUTING + 3);
      }
      // Operations narrower than a pixel share the pixel, which is drawn once per lane.
      const drawn = [];
      for (let at = 0; at < numbers.length; at += STRIDE) {
        if (numbers[at] > to) break;
        if (end(rank, at) < from) continue;
        inView += 1;
        const row = numbers[at + LANE], begin = x(numbers[at]), whole = numbers[at + LASTED] * scale;
        const wide = Math.max(1, whole > 3 ? whole - 1 : whole); // a gap between neighbours
        if (begin + wide <= drawn[row]) continue;
        drawn[row] = Math.ceil(begin + wide);
        context.fillStyle = numbers[at + ERROR] >= 0 ? ink("--bad") : colours[numbers[at + OPERATION] % COLOURS];
        context.fillRect(begin, lanesTop + row * lane, wide, lane - 1);
      }
      context.fillStyle = ink("--computing");
      for (let at = 0; at < rank.computing.length; at += 3) {
        const [begin, finish, percent] = rank.computing.slice(at, at + 3);
        if (finish < from || begin > to || percent === 0) continue;
        context.globalAlpha = percent / 100;
        context.fillRect(x(begin), below + 1, Math.max(0.5, (finish - begin) * scale), COMPUTING - 1);
      }
      context.globalAlpha = 1;
      context.fillStyle = ink("--text");
      context.fillText(`rank ${rank.rank}`, 4, top + LABEL / 2);
      const after = 4 + context.measureText(`rank ${rank.rank} `).width;
      context.fillStyle = ink("--quiet");
      context.fillText(rank.host, after + 4, top + LABEL / 2);
    });

    if (chosen !== null) {
      const met = call(chosen.rank, chosen.at);
      context.strokeStyle = context.fillStyle = ink("--text");
      context.lineWidth = 1.5;
      const points = met.map(([rank, at]) => {
        const { top, lane } = places[windowNow.ranks.indexOf(rank)];
        const y = top + LABEL + rank.operations[at + LANE] * lane;
        context.strokeRect(x(rank.operations[at]), y - 0.5, Math.max(2, rank.operations[at + LASTED] * scale), lane);
        return [x(rank.operations[at]), y + lane / 2];
      });
      context.lineWidth = 1;
      context.beginPath();
      for (const [left, y] of points.sort((a, b) => a[1] - b[1])) context.lineTo(left, y);
      context.stroke();
    }
    const operations = inView === 1 ? "operation" : "operations";
    shown.textContent = `${time(from)} to ${time(to)} of ${windowNow.name}: ${inView} ${operations} in view`;
    canvas.dataset.inView = inView;
    if (list.closest("details").open) fill();
  };

  const schedule = () => {
    if (isScheduled) return;
    isScheduled = true;
    requestAnimationFrame(draw);
  };

  // The operations in view, as rows of a table.
  const fill = () => {
    const found = [];
    for (const rank of windowNow.ranks) {
      for (let at = 0; at < rank.operations.length; at += STRIDE) {
        if (rank.operations[at] <= to && end(rank, at) >= from) found.push([rank, at]);
      }
    }
    found.sort((a, b) => a[0].operations[a[1]] - b[0].operations[b[1]]);
    const rows = found.slice(0, MOST_LISTED).map(([rank, at]) => {
      const row = document.createElement("tr");
      const cells = [rank.rank, name("operation", rank, at, OPERATION), bytes(rank.operations[at + BYTES]),
        time(rank.operations[at]), rank.operations[at + SUBMITTED] ? "not known" : time(rank.operations[at + LASTED]),
        rank.operations[at + SEQUENCE],
        name("group", rank, at, GROUP), name("algorithm", rank, at, ALGORITHM), name("wire", rank, at, WIRE)];
      for (const cell of cells) row.insertCell().textContent = cell;
      return row;
    });
    list.tBodies[0].replaceChildren(...rows);
    list.caption.textContent = found.length > rows.length
      ? `The first ${rows.length} of the ${found.length} operations in view; zoom in for the rest.`
      : `The ${found.length} operations in view.`;
  };

  const look = (begin, finish) => {
    const length = Math.min(windowNow.length, Math.max(100, finish - begin));
    from = Math.max(0, Math.min(windowNow.length - length, begin));
    to = from + length;
    schedule();
  };
  const zoom = (factor, part = 0.5) => {
    const length = (to - from) * factor, middle = from + (to - from) * part;
    look(middle - length * part, middle + length * (1 - part));
  };
  const pan = (part) => look(from + (to - from) * part, to + (to - from) * part);

  const open = (which) => {
    windowNow = data.windows[which];
    chosen = null;
    picked.textContent = "";
    [...windows.children].forEach((button, index) => button.setAttribute("aria-pressed", index === which));
    arrange();
    look(0, windowNow.length);
  };

  const find = (left, down) => {
    const at = from + left * (to - from) / canvas.clientWidth;
    const slack = SLACK * (to - from) / canvas.clientWidth;
    let best = null, nearest = Infinity;
    windowNow.ranks.forEach((rank, index) => {
      const { top, lane } = places[index];
      const row = Math.floor((down - top - LABEL) / lane);
      if (row < 0 || row >= Math.max(1, rank.lanes)) return;
      for (let one = 0; one < rank.operations.length; one += STRIDE) {
        if (rank.operations[one] > at + slack) break;
        const off = Math.max(rank.operations[one] - at, at - end(rank, one), 0);
        if (rank.operations[one + LANE] === row && off <= slack && off < nearest) [best, nearest] = [{ rank, at: one }, off];
      }
    });
    return best;
  };

  const choose = (event) => {
    const found = find(event.offsetX, event.offsetY);
    if (found?.rank === chosen?.rank && found?.at === chosen?.at) return;
    chosen = found;
    if (found === null) {
      picked.textContent = "";
    } else {
      const met = call(found.rank, found.at);
      const spread = met.length > 1
        ? `. Rank ${met.at(-1)[0].rank} was the last of ${met.length} to ` +
          `${found.rank.operations[found.at + SUBMITTED] ? "submit it" : "begin"}, ` +
          `${time(met.at(-1)[0].operations[met.at(-1)[1]] - met[0][0].operations[met[0][1]])} after rank ${met[0][0].rank}`
        : "";
      picked.textContent = describe(found.rank, found.at) + spread + ".";
    }
    schedule();
  };

  // One pointer moves, two pointers zoom. The page scrolls up and down.
  const pointers = new Map();
  canvas.addEventListener("pointerdown", (event) => {
    pointers.set(event.pointerId, event.offsetX);
    canvas.setPointerCapture(event.pointerId);
    choose(event);
  });
  canvas.addEventListener("pointermove", (event) => {
    if (!pointers.has(event.pointerId)) return choose(event);
    const before = [...pointers.values()];
    const moved = event.offsetX - pointers.get(event.pointerId);
    pointers.set(event.pointerId, event.offsetX);
    if (pointers.size === 1) return pan(-moved / canvas.clientWidth);
    const after = [...pointers.values()];
    const apart = (pair) => Math.max(8, Math.abs(pair[0] - pair[1]));
    zoom(apart(before) / apart(after), (after[0] + after[1]) / 2 / canvas.clientWidth);
  });
  for (const kind of ["pointerup", "pointercancel"]) {
    canvas.addEventListener(kind, (event) => pointers.delete(event.pointerId));
  }
  canvas.addEventListener("wheel", (event) => {
    if (event.ctrlKey || event.metaKey) zoom(Math.exp(event.deltaY / 300), event.offsetX / canvas.clientWidth);
    else if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) pan((event.deltaX || event.deltaY) / canvas.clientWidth);
    else return;
    event.preventDefault();
  }, { passive: false });
  canvas.addEventListener("dblclick", (event) => zoom(0.5, event.offsetX / canvas.clientWidth));
  const commands = {
    "+": () => zoom(0.5), "=": () => zoom(0.5), "-": () => zoom(2), "0": () => look(0, windowNow.length),
    ArrowLeft: () => pan(-0.2), ArrowRight: () => pan(0.2),
  };
  canvas.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || !(event.key in commands)) return;
    commands[event.key]();
    event.preventDefault();
  });
  for (const button of document.querySelectorAll("[data-command]")) {
    button.addEventListener("click", commands[button.dataset.command]);
  }

  const key = document.getElementById("timeline-key");
  data.names.operation.forEach((operation, index) => {
    const entry = document.createElement("span");
    const colour = document.createElement("i");
    colour.style.background = `var(--series-${index % COLOURS})`;
    entry.append(colour, operation);
    key.append(entry);
  });
  data.windows.forEach((each, index) => {
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = each.name;
    button.addEventListener("click", () => open(index));
    windows.append(button);
  });
  windows.hidden = data.windows.length < 2;

  const again = () => { arrange(); draw(); };
  list.closest("details").addEventListener("toggle", schedule);
  new ResizeObserver(again).observe(scroller);
  for (const query of ["(prefers-color-scheme: dark)", "print"]) matchMedia(query).addEventListener("change", again);
  open(0);
  draw();
}
