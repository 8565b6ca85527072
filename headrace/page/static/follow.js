// Views that a program opens for its person: `POST /api/view` on the server reaches every open page here.

/** Calls `open(path)` for each view that a program opens. Returns a function that ends this. */
export function follow(open) {
  const source = new EventSource("/api/follow");
  source.addEventListener("view", (event) => open(JSON.parse(event.data).path));
  return () => source.close();
}
