// c[m, n] = a[m, k] · b[k, n] in float32: a panel of b is copied to contiguous memory, then read once per tile of rows.

#define VECTORS (COLUMNS / 16)

template <int R>
static void tile_of(int64_t rows, const float* a, const float* panel, float* c, int64_t n, int64_t k, int64_t columns) {
  if (rows < R) {
    if constexpr (R > 1) tile_of<R - 1>(rows, a, panel, c, n, k, columns);
    return;
  }
  Lanes sums[R][VECTORS] = {};
  for (int64_t p = 0; p < k; ++p) {
    Lanes b[VECTORS];
#pragma GCC unroll 4
    for (int v = 0; v < VECTORS; ++v) b[v] = load(panel + p * COLUMNS + 16 * v);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
      for (int v = 0; v < VECTORS; ++v) sums[r][v] += b[v] * a[r * k + p];
  }
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < VECTORS; ++v) {
      if (columns >= 16 * (v + 1))
        store(c + r * n + 16 * v, sums[r][v]);
      else if (columns > 16 * v)
        store_some(c + r * n + 16 * v, sums[r][v], columns - 16 * v);
    }
}

extern "C" void run_matmul(const float* a, const float* b, float* c, int64_t m, int64_t n, int64_t k) {
  const int64_t blocks = (n + COLUMNS - 1) / COLUMNS;
#pragma omp parallel if (m * n * k >= PARALLEL_FROM) TEAM
  {
    float* panel = (float*)malloc(k * COLUMNS * sizeof(float) + 64);
#pragma omp for schedule(SCHEDULE)
    for (int64_t block = 0; block < blocks; ++block) {
      const int64_t first = block * COLUMNS, columns = n - first < COLUMNS ? n - first : COLUMNS;
      for (int64_t p = 0; p < k; ++p) {
        memcpy(panel + p * COLUMNS, b + p * n + first, columns * sizeof(float));
        memset(panel + p * COLUMNS + columns, 0, (COLUMNS - columns) * sizeof(float));
      }
      for (int64_t r = 0; r < m; r += ROWS)
        tile_of<ROWS>(m - r < ROWS ? m - r : ROWS, a + r * k, panel, c + r * n + first, n, k, columns);
    }
    free(panel);
  }
}
