// All pages work without this script: it puts new numbers and frames into a page that is open.
"use strict";
(() => {
  const main = document.querySelector("main[data-live]");
  if (!main || !window.EventSource) return;
  const rungs = document.getElementById("rungs");
  const places = new Map();
  for (const each of main.querySelectorAll("[data-key]")) places.set(each.dataset.key, each);
  const address = new URL(main.dataset.live, location.href);
  const kept = 1000;
  let source = null;

  const numbers = (event) => {
    for (const [key, text] of Object.entries(JSON.parse(event.data))) {
      const place = places.get(key);
      if (place) place.textContent = text;
    }
  };

  const frames = (event) => {
    const told = JSON.parse(event.data);
    for (const [connection, at, arrow, text, bad] of told.rungs) {
      const row = rungs.insertRow();
      if (bad) row.className = "bad";
      for (const value of ["#" + connection, at, arrow, text]) row.insertCell().textContent = value;
      row.cells[1].className = "number";
    }
    while (rungs.rows.length > kept) rungs.deleteRow(0);
    rungs.dataset.count = told.count;
  };

  const open = () => {
    if (rungs) address.searchParams.set("since", rungs.dataset.count);
    source = new EventSource(address);
    source.addEventListener("numbers", numbers);
    if (rungs) source.addEventListener("frames", frames);
    // The server ends a stream after some minutes, and when it has no room: the next try is in ten seconds.
    source.onerror = () => {
      close();
      setTimeout(() => { if (!document.hidden && !source) open(); }, 10000);
    };
  };
  const close = () => {
    if (source) source.close();
    source = null;
  };
  // A page that is not visible keeps no stream.
  document.addEventListener("visibilitychange", () => {
    if (document.hidden) close();
    else if (!source) open();
  });
  addEventListener("pagehide", close);
  open();
})();
