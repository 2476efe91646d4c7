// Samples by column, oldest first, bounded in number. What comes twice after a reconnect is taken once.

export class Columns {
  constructor(width, kept) {
    this.kept = kept;
    this.data = Array.from({ length: width }, () => []);
  }

  get times() {
    return this.data[0];
  }

  get last() {
    return this.times.at(-1) ?? 0;
  }

  // rows: [[time, value, ...], ...]. A gap is drawn as one: a row without values stands in it.
  add(rows, gapS) {
    for (const row of rows) {
      if (row[0] <= this.last) continue;
      if (this.times.length && row[0] - this.last > gapS) this.push([this.last + gapS / 2, ...row.slice(1).map(() => null)]);
      this.push(row);
    }
    const extra = this.times.length - this.kept;
    if (extra > 0) this.data.forEach((column) => column.splice(0, extra));
  }

  push(row) {
    row.forEach((value, index) => this.data[index].push(value));
  }

  // The part that a chart of this range needs.
  since(timeS) {
    const from = this.times.findIndex((each) => each >= timeS);
    return from <= 0 ? this.data : this.data.map((column) => column.slice(from));
  }
}
