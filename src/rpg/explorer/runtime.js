// What translated Python runs on: a Tensor is one number v and its derivative d by log π, as autograd would have it.

class Tensor {
  constructor(v, d = 0) { this.v = Number(v); this.d = d; }
  get requires_grad() { return this.d !== 0; }
  get dtype() { return "float64"; }
  detach() { return new Tensor(this.v); }
  to() { return this; }
  dim() { return 0; }
  unsqueeze() { return this; }
  sum() { return this; }
  exp() { const e = Math.exp(this.v); return new Tensor(e, e * this.d); }
  log() { return new Tensor(Math.log(this.v), this.d && this.d / this.v); }
  abs() { return new Tensor(Math.abs(this.v), Math.sign(this.v) * this.d); }
  sign() { return new Tensor(Math.sign(this.v)); }
  square() { return mul(this, this); }
  clamp(low = -Infinity, high = Infinity) {
    if (low instanceof Named) ({ min: low = -Infinity, max: high = Infinity } = low);
    if (high instanceof Named) high = high.max;
    return new Tensor(Math.min(Math.max(this.v, low), high), this.v >= low && this.v <= high ? this.d : 0);
  }
}

class _Bound { // clamps the value, keeps the gradient: loss/objective.py
  static apply(x, limit) { return new Tensor(Math.min(Math.max(x.v, -limit), limit), x.d); }
}

class Named { constructor(values) { Object.assign(this, values); } }
const named = (values) => new Named(values);

/** A dataclass or a NamedTuple: fields by place or by name, then by default. */
class Data {
  static fields = [];
  constructor(...given) {
    const byName = given.at(-1) instanceof Named ? given.pop() : {};
    this.constructor.fields.forEach(([name, fallback], i) => {
      const value = i < given.length ? given[i] : name in byName ? byName[name] : fallback ? fallback() : undefined;
      if (value === undefined) throw raised("TypeError", `${this.constructor.name} needs ${name}`);
      Object.defineProperty(this, name, { value, enumerable: true });
    });
    if (this.__post_init__) this.__post_init__();
  }
  *[Symbol.iterator]() { for (const [name] of this.constructor.fields) yield this[name]; }
}

const replace = (data, changes) => new data.constructor(named({ ...data, ...changes }));
const raised = (kind, text) => Object.assign(new Error(text), { name: kind });
const isTensor = (x) => x instanceof Tensor;
const num = (x) => (isTensor(x) ? x.v : Number(x));
const slope = (x) => (isTensor(x) ? x.d : 0);
const either = (a, b) => isTensor(a) || isTensor(b);
/** On numbers a number, on tensors a tensor with its derivative. */
const binary = (value, derivative) => (a, b) => {
  const result = value(num(a), num(b));
  return either(a, b) ? new Tensor(result, slope(a) || slope(b) ? derivative(num(a), num(b), slope(a), slope(b)) : 0) : result;
};
const compared = (test) => (a, b) => (either(a, b) ? new Tensor(test(num(a), num(b))) : test(a, b));

const add = (a, b) => (typeof a === "string" || Array.isArray(a) ? a.concat(b) : sum(a, b));
const sum = binary((a, b) => a + b, (a, b, da, db) => da + db);
const sub = binary((a, b) => a - b, (a, b, da, db) => da - db);
const mul = binary((a, b) => a * b, (a, b, da, db) => da * b + a * db);
const div = binary((a, b) => a / b, (a, b, da, db) => (da - (a / b) * db) / b);
const pow = binary((a, b) => a ** b, (a, b, da) => b * a ** (b - 1) * da);
const neg = (a) => mul(-1, a);
const lt = compared((a, b) => a < b), le = compared((a, b) => a <= b), gt = compared((a, b) => a > b), ge = compared((a, b) => a >= b);
const eq = compared((a, b) => a === b), ne = compared((a, b) => a !== b);
const and = (a, b) => new Tensor(num(a) && num(b));
const or = (a, b) => (either(a, b) ? new Tensor(num(a) || num(b)) : [a, b].flat()); // types, for isinstance
const not = (a) => new Tensor(!num(a));
const isinstance = (x, types) => [types].flat().some((type) => x instanceof type);
const contains = (all, one) => (Array.isArray(all) || typeof all === "string" ? all.includes(one) : one in all);
const range = (n) => Array.from({ length: n }, (_, i) => i);
const max = (...x) => Math.max(...x.flat()), min = (...x) => Math.min(...x.flat()), len = (x) => x.length, abs = (x) => (isTensor(x) ? x.abs() : Math.abs(x));
const str = (x) => format(x, ""), map = (f, xs) => [...xs].map((x) => f(x));
const float = num;
const type = (x) => ({ __name__: x.constructor.name });
const object = { __setattr__() {} }; // fields are as they were given
const dict = (pairs) => Object.defineProperty(pairs, Symbol.iterator, { value: function* () { yield* Object.keys(this); } });
const one_of = (what, name, names) => { if (!names.includes(name)) throw raised("ValueError", `unknown ${what} ${name}`); };
const tuple = (x) => [...x];

const math = { e: Math.E, inf: Infinity, exp: Math.exp, log: Math.log, log1p: Math.log1p, expm1: Math.expm1, sqrt: Math.sqrt };
const torch = {
  bool: "bool",
  where: (test, a, b) => { const x = num(test) ? a : b; return isTensor(x) ? x : new Tensor(x); },
  expm1: (x) => new Tensor(Math.expm1(x.v), Math.exp(x.v) * x.d),
  sigmoid: (x) => { const s = 1 / (1 + Math.exp(-x.v)); return new Tensor(s, s * (1 - s) * x.d); },
  zeros_like: () => new Tensor(0),
  ones_like: () => new Tensor(1),
  add: (a, b, { alpha }) => add(a, mul(alpha, b)),
};

/** As Python's format: "" and "r" as str and repr have it, ".4g", ".2f". */
function format(x, style) {
  if (typeof x === "string") return style === "r" ? `'${x}'` : x;
  if (x === null) return "None";
  if (style === "" || style === "r") return Number.isInteger(x) ? `${x}.0` : String(x);
  const [, digits, kind] = style.match(/^(?:\.(\d+))?([gf])$/);
  if (!Number.isFinite(x)) return String(x).replace("Infinity", "inf").replace("NaN", "nan");
  if (kind === "f") return x.toFixed(digits);
  const precision = Number(digits || 6) || 1;
  const [mantissa, exponent] = x.toExponential(precision - 1).split("e").map(Number);
  const short = (text) => (text.includes(".") ? text.replace(/\.?0+$/, "") : text);
  if (x !== 0 && (exponent < -4 || exponent >= precision))
    return `${short(String(mantissa))}e${exponent < 0 ? "-" : "+"}${String(Math.abs(exponent)).padStart(2, "0")}`;
  return short(x.toFixed(Math.max(precision - 1 - exponent, 0)));
}
