// o = silu(x) · y, element by element; bf16 is rounded between the two, as stock code does.

static inline void elements(const ELEMENT* x, const ELEMENT* y, ELEMENT* o) {
  store(o, round_to(silu(load(x)), o) * load(y));
}

static void block_of(const ELEMENT* x, const ELEMENT* y, ELEMENT* o, int64_t count) {
  int64_t i = 0;
  for (; i + 16 * UNROLL <= count; i += 16 * UNROLL)
#pragma GCC unroll 4
    for (int u = 0; u < UNROLL; ++u) elements(x + i + 16 * u, y + i + 16 * u, o + i + 16 * u);
  for (; i + 16 <= count; i += 16) elements(x + i, y + i, o + i);
  if (i < count)
    store_some(o + i, round_to(silu(load_some(x + i, count - i)), o) * load_some(y + i, count - i), count - i);
}

extern "C" void run_silu_mul(const ELEMENT* x, const ELEMENT* y, ELEMENT* o, int64_t n) {
#pragma omp parallel for schedule(static) if (n >= PARALLEL_FROM) TEAM
  for (int64_t start = 0; start < n; start += BLOCK)
    block_of(x + start, y + start, o + start, n - start < BLOCK ? n - start : BLOCK);
}
