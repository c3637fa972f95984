// A bf16 linear layer on packed weights: memory-bound at few rows, register-blocked at many.

template <int R>
static void tile(const bf16* x, const bf16* w, bf16* y, int64_t n, int64_t k, int64_t columns) {
  Lanes sums[R][VECTORS];
  multiply<R>(x, k, w, k, sums);
#pragma GCC unroll 32
  for (int r = 0; r < R; ++r) store_row(y + r * n, sums[r], columns);
}

template <int R>
static void rows_of(int64_t rows, const bf16* x, const bf16* w, bf16* y, int64_t n, int64_t k, int64_t columns) {
  if (rows == R)
    tile<R>(x, w, y, n, k, columns);
  else if constexpr (R > 1)
    rows_of<R - 1>(rows, x, w, y, n, k, columns);
}

extern "C" int64_t prepare_linear_bytes(int64_t, int64_t n, int64_t k) { return packed_bytes(n, k); }

extern "C" void prepare_linear(const bf16* w, void* packed, int64_t, int64_t n, int64_t k) {
  ask_for_huge_pages(packed, packed_bytes(n, k));
#pragma omp parallel for TEAM
  for (int64_t b = 0; b < ceil_div(n, COLUMNS); ++b)
    pack_block(w, (bf16*)packed + b * COLUMNS * ceil_div(k, 2) * 2, b, n, k);
}

extern "C" void run_linear(const bf16* x, const void* packed, bf16* y, int64_t m, int64_t n, int64_t k) {
  if (m <= 0) return;
  const int64_t blocks = ceil_div(n, COLUMNS), chunks = ceil_div(m, ROW_CHUNK), chunk = ceil_div(m, chunks);
#pragma omp parallel for collapse(2) schedule(SCHEDULE) TEAM
  for (int64_t b = 0; b < blocks; ++b)
    for (int64_t c = 0; c < chunks; ++c) {
      const int64_t last = c * chunk + chunk < m ? c * chunk + chunk : m;
      const int64_t tiles = ceil_div(last - c * chunk, ROWS), step = tiles > 0 ? ceil_div(last - c * chunk, tiles) : 1;
      for (int64_t r = c * chunk; r < last; r += step)
        rows_of<ROWS>(r + step < last ? step : last - r, x + r * k, (const bf16*)packed + b * COLUMNS * ceil_div(k, 2) * 2,
                      y + r * n + b * COLUMNS, n, k, n - b * COLUMNS);
    }
}
