// The chats that this browser keeps, newest first. Without storage, or without room in it, they last until
// the page is left.

const INDEX = "atom-chats";
const PREFIX = "atom-chat-";
const MAX_CHATS = 50;
const MAX_CHARS = 2_000_000; // of all chats; browsers give a site some five million

/** Keeps chats: {id, title, ...} that JSON can hold. `storage` is a Storage, or null. */
export class ChatStore {
  #storage;

  constructor(storage) {
    this.#storage = storage;
  }

  /** [{id, title, size}], the latest saved first. */
  list() {
    const found = this.#read(INDEX);
    if (!Array.isArray(found)) return [];
    return found.filter((each) => typeof each?.id === "string" && typeof each.title === "string");
  }

  /** The chat, or null if it is not kept. */
  load(id) {
    const found = this.#read(PREFIX + id);
    return found && Array.isArray(found.entries) ? found : null;
  }

  /** Keep a chat; the oldest ones make room. Returns whether it is kept. */
  save(chat) {
    const text = JSON.stringify(chat);
    let rest = this.list().filter(({ id }) => id !== chat.id);
    if (text.length > MAX_CHARS) return false;
    while (rest.length >= MAX_CHATS || sum(rest) + text.length > MAX_CHARS) rest = this.#dropOldest(rest);
    for (;;) {
      const index = [{ id: chat.id, title: chat.title, size: text.length }, ...rest];
      if (this.#write(PREFIX + chat.id, text) && this.#write(INDEX, JSON.stringify(index))) return true;
      if (!rest.length) return false;
      rest = this.#dropOldest(rest);
    }
  }

  remove(id) {
    this.#use((storage) => storage.removeItem(PREFIX + id));
    const rest = this.list().filter((each) => each.id !== id);
    this.#write(INDEX, JSON.stringify(rest));
  }

  #dropOldest(rest) {
    this.#use((storage) => storage.removeItem(PREFIX + rest.at(-1).id));
    return rest.slice(0, -1);
  }

  #read(name) {
    return this.#use((storage) => JSON.parse(storage.getItem(name))) ?? null;
  }

  #write(name, text) {
    return this.#use((storage) => storage.setItem(name, text) ?? true) ?? false;
  }

  /** What `use` returns; undefined where storage is off or full, or holds something else. */
  #use(use) {
    try {
      return this.#storage ? use(this.#storage) : undefined;
    } catch {
      return undefined;
    }
  }
}

function sum(index) {
  return index.reduce((total, { size }) => total + (Number(size) || 0), 0);
}

/** The browser's storage; null where it is off. */
export function browserStorage() {
  try {
    return localStorage;
  } catch {
    return null;
  }
}
